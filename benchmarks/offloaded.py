"""Whole generations of a model whose weights do not fit on the device."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.cases import case_parser
from benchmarks.generations import random_prompts
from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from benchmarks.record import print_row, record
from benchmarks.shapes import SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.offload.placement import host_weight_bytes
from jdllm.llm import LLM
from jdllm.planning.step_time import RATES

GIB = 2**30
BLOCK = 32


def measure(llm: LLM, context: int) -> dict[str, Any]:
    """Seconds of a step of one request of `context` tokens that generates a block, in the second of two."""
    sampling = SamplingParams(gen_length=BLOCK, block_length=BLOCK, steps=BLOCK, early_stop=False)
    prompts, seconds = random_prompts(llm.config, [context - BLOCK]), 0.0
    for _ in range(2):
        start = time.perf_counter()
        llm.generate(prompt_token_ids=prompts, sampling=sampling)
        seconds = time.perf_counter() - start
    account = llm.account
    streamed = host_weight_bytes(llm.config, "bfloat16", account.offloaded)
    floor = streamed / RATES["h200"].host_bytes
    return {
        "context": context,
        "layers_in_host_memory": account.offloaded,
        "resident_gib": account.weights / GIB,
        "streamed_gib": streamed / GIB,
        "step_s": seconds / BLOCK,
        "floor_s": floor,
        "of_floor": seconds / BLOCK / floor if floor else float("nan"),
        "peak_gib": _peak_gib(),
        "budget_gib": account.budget.device / GIB if account.budget else float("nan"),
        "overhead_gib": account.budget.overhead / GIB if account.budget else float("nan"),
    }


def _peak_gib() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", float("nan")) / GIB


def main(arguments: Sequence[str]) -> None:
    """A block of one request, with as many layers on the device as a budget has room for.

    `python3 -m benchmarks offloaded [--memory 8GiB] [--context 4096]` on a card. The checkpoint has random
    weights (16 GB for llada-8b). The floor is the time that the layers take from pinned host memory.
    """
    parser = case_parser("offloaded", main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--memory", nargs="+", default=["8GiB"])
    parser.add_argument("--context", type=int, nargs="+", default=[4096])
    parser.add_argument(
        "--directory", type=Path, help="where the checkpoint is written, by default temporary"
    )
    args = parser.parse_args(arguments)
    table = []
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        checkpoint = write_random_checkpoint(Path(scratch) / args.shape, llada_hf_config(SHAPES[args.shape]))
        for memory in args.memory:
            start = time.perf_counter()
            with LLM(checkpoint, memory=memory, progress=False) as llm:
                loaded = {"load_s": time.perf_counter() - start, "loaded_peak_gib": _peak_gib()}
                for context in args.context:
                    row = {"shape": args.shape, "memory": memory} | loaded
                    table.append(row | measure(llm, context))
                    print_row(table[-1])
    record(f"offloaded_{args.shape}", table, args.out, host_gb_s=RATES["h200"].host_bytes / 1e9)
