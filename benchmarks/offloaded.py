"""Whole generations of a model whose weights do not fit on the device."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.cases import case_parser
from benchmarks.causal import prompts_of
from benchmarks.random_checkpoint import HF_CONFIGS, write_random_checkpoint
from benchmarks.record import print_row, record
from benchmarks.shapes import CAUSAL_SHAPES, SHAPES
from jdllm.decoding.registry import cache_names
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.offload.placement import host_weight_bytes
from jdllm.llm import LLM
from jdllm.planning.step_time import RATES

GIB = 2**30
BLOCK = 32
_MEMORY = "8GiB"
_CAUSAL = {name: shape for name, shape in CAUSAL_SHAPES.items() if shape.family in HF_CONFIGS}
ALL_SHAPES = {name: SHAPES[name] for name in ("llada-8b", "dream-7b")} | _CAUSAL


def measure(llm: LLM, context: int, cache: str, requests: int) -> dict[str, Any]:
    """What an evaluation takes while requests of `context` tokens generate a block, in a second run. Its
    prompts are others: a causal model has stored those of the first.

    Arguments:
    - `cache`: of the requests; has no meaning for a causal model, whose prompts count as evaluations too.
    """
    options: Any = {} if llm.config.in_order else {"block_length": BLOCK, "steps": BLOCK, "cache": cache}
    sampling = SamplingParams(gen_length=BLOCK, early_stop=False, **options)
    seconds, evaluations = 0.0, 0
    for run in range(2):
        prompts = prompts_of(llm.config, requests, context - BLOCK, seed=run)
        start, before = time.perf_counter(), llm.engine.evaluated
        llm.generate(prompt_token_ids=prompts, sampling=sampling)
        seconds, evaluations = time.perf_counter() - start, llm.engine.evaluated - before
    account = llm.account
    streamed = host_weight_bytes(llm.config, "bfloat16", account.offloaded)
    floor = streamed / RATES["h200"].host_bytes
    return {
        "context": context,
        "cache": cache,
        "requests": requests,
        "tokens_per_s": requests * BLOCK / seconds,
        "layers_in_host_memory": account.offloaded,
        "resident_gib": account.weights / GIB,
        "pool_gib": account.pool_bytes / GIB,
        "streamed_gib": streamed / GIB,
        "evaluations": evaluations,
        "step_s": seconds / evaluations,
        "floor_s": floor,
        "of_floor": seconds / evaluations / floor if floor else float("nan"),
        "peak_gib": _peak_gib(),
        "budget_gib": account.budget.device / GIB if account.budget else float("nan"),
        "overhead_gib": account.budget.overhead / GIB if account.budget else float("nan"),
    }


def _peak_gib() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", float("nan")) / GIB


def main(arguments: Sequence[str]) -> None:
    """A block of each of some requests, with as many layers on the device as a budget has room for.

    `python3 -m benchmarks offloaded [--memory 8GiB] [--context 4096] [--cache dual] [--requests 1 16]`, on a
    card. The checkpoint has random weights (16 GB for llada-8b). The floor is the time that the layers take
    from pinned host memory in an evaluation.
    """
    parser = case_parser("offloaded", main.__doc__)
    parser.add_argument("--shape", choices=ALL_SHAPES, default="llada-8b")
    parser.add_argument("--memory", nargs="+", default=[_MEMORY])
    parser.add_argument("--kv-pool", help="bytes of the KV pool, by default as an LLM chooses them")
    parser.add_argument("--context", type=int, nargs="+", default=[4096])
    parser.add_argument("--cache", nargs="+", choices=cache_names(), default=["none"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--directory", type=Path, help="where the checkpoint is written, by default temporary"
    )
    args = parser.parse_args(arguments)
    shape, table = ALL_SHAPES[args.shape], []
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        checkpoint = write_random_checkpoint(Path(scratch) / args.shape, HF_CONFIGS[shape.family](shape))
        for memory in args.memory:
            start = time.perf_counter()
            with LLM(checkpoint, memory=memory, kv_pool=args.kv_pool, progress=False) as llm:
                loaded = {"load_s": time.perf_counter() - start, "loaded_peak_gib": _peak_gib()}
                for context in args.context:
                    for cache in args.cache:
                        for requests in args.requests:
                            row = {"shape": args.shape, "memory": memory} | loaded
                            table.append(row | measure(llm, context, cache, requests))
                            print_row(table[-1])
    asked = [x for x in (*args.cache, *args.memory) if x not in ("none", _MEMORY)]
    record(
        "_".join(["offloaded", args.shape, *asked]), table, args.out, host_gb_s=RATES["h200"].host_bytes / 1e9
    )
