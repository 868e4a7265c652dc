"""Requests with a dual cache beyond the KV pool: time and memory of layers whose keys are in host memory."""

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from benchmarks.apart import record_apart
from benchmarks.cases import case_parser
from benchmarks.generations import random_prompts
from benchmarks.shapes import SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.planning.layered import Layered, plan_layered
from jdllm.planning.step_time import RATES, step_flops
from jdllm.serving.demands import Kind

GIB, BLOCK = 2**30, 32
_CARD = "h200"


def case(shape: str, length: int, memory: str, host: str, steps: int) -> dict[str, Any]:
    """One row of the table: a block of `BLOCK` tokens at the end of so many tokens."""
    config = SHAPES[shape]
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    with LLM(model, memory=memory, host_memory=host, progress=False) as llm:
        layered = Layered.of_account(config, "bfloat16", llm.account)
        plan = None if layered is None else plan_layered(layered, length, 0)
        if plan is None:
            raise SystemExit(f"{length} tokens have no room in {memory}")
        sampling = SamplingParams(
            gen_length=BLOCK, block_length=BLOCK, steps=steps, cache="dual", early_stop=False
        )
        times = [time.perf_counter()]
        [output] = llm.generate(
            prompt_token_ids=random_prompts(config, [length - BLOCK]),
            sampling=sampling,
            on_step=lambda _: times.append(time.perf_counter()),
        )
        overhead = 0 if llm.account.budget is None else llm.account.budget.overhead
        parts = llm.engine.stats().parts[Kind.LAYERED]
    if not parts:
        raise SystemExit(f"{length} tokens fit the KV pool of {memory}: ask for more tokens or less memory")
    refresh, *reuses = (after - before for before, after in itertools.pairwise(times))
    reuse = statistics.median(reuses[1:])
    rates, stats = RATES[_CARD], jax.devices()[0].memory_stats() or {}
    floor = plan.streamed_bytes / rates.host_bytes
    return {
        "shape": shape,
        "tokens": length,
        "memory": memory,
        "chunk": plan.layering.chunk,
        "kept": plan.layering.kept,
        "kept_behind": plan.layering.kept_behind,
        "evaluations": output.nfe,
        "parts": parts,
        "refresh_s": refresh,
        "refresh_floor_s": step_flops(config, length, BLOCK) / rates.flops,
        "reuse_s": reuse,
        "streamed_gib": plan.streamed_bytes / GIB,
        "reuse_floor_s": floor,
        "of_floor": reuse / floor if floor else float("nan"),
        "host_gib": plan.host_bytes / GIB,
        "peak_gib": stats.get("peak_bytes_in_use", 0) / GIB,
        "planned_gib": (max(plan.prompt_bytes, plan.token_bytes) - overhead) / GIB,
    }


def main(arguments: Sequence[str]) -> None:
    """Time of a refresh and of the reuses behind it of one request, by tokens@memory.

    `python3 -m benchmarks cached_long [409600@24GiB 262144@24GiB] [--shape dream-7b] [--steps 8]` on a card:
    a block of 32 tokens, layer by layer with keys in host memory. A refresh is measured once, compiling
    included. Floors are the arithmetic of a refresh, and the time that the streamed keys take from pinned
    host memory. Peaks are XLA's, without what is planned for the CUDA context; the plan leaves room for a
    step of others, which does not run here. Each request runs in a process of its own. What cannot run is
    named, and stops no other.
    """
    parser = case_parser("cached_long", main.__doc__)
    parser.add_argument("requests", nargs="*", default=["409600@24GiB", "262144@24GiB"])
    parser.add_argument("--shape", choices=SHAPES, default="dream-7b")
    parser.add_argument("--host-memory", default="64GiB")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--child", action="store_true", help="measure one request here, and print a line")
    args = parser.parse_args(arguments)
    if args.child:
        length, _, memory = args.requests[0].partition("@")
        print(json.dumps(case(args.shape, int(length), memory, args.host_memory, args.steps)), flush=True)
        return
    record_apart("cached_long", args.requests, arguments, f"cached_long_{args.shape}", args.out)
