"""Prompts of causal models beyond the KV pool: time and memory of layers whose keys are in host memory."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from benchmarks.apart import record_apart
from benchmarks.cases import case_parser
from benchmarks.causal import prompts_of, seconds_of, told_seconds
from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.planning.causal import CausalPlan, plan_causal
from jdllm.planning.plan import Workload
from jdllm.planning.step_time import RATES, step_flops

GIB = 2**30
_CARD = "h200"


def case(
    shape: str, length: int, memory: str, host: str, rows: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """One row of the table, in a process of its own: its peak is that of nothing else."""
    config = CAUSAL_SHAPES[shape]
    model = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16")
    with LLM(model, memory=memory, host_memory=host, max_num_batched_tokens=rows, progress=False) as llm:
        plan = plan_causal(Workload(config, "bfloat16"), llm.account, _CARD, length, tokens)
        if repeats:
            seconds_of(llm, prompts_of(config, 1, length, 0), 2)
        runs = [
            told_seconds(llm, prompts_of(config, 1, length, seed + 1), tokens)
            for seed in range(max(1, repeats))
        ]
        budget = llm.account.budget
        overhead = 0 if budget is None else budget.overhead
    first, second = (statistics.median(run[i] for run in runs) for i in range(2))
    further = statistics.median((run[-1] - run[1]) / (tokens - 2) for run in runs)
    floor = step_flops(config, length, 1) / RATES[_CARD].flops
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "shape": shape,
        "prompt": length,
        "memory": memory,
        **_where(plan),
        "compiling": not repeats,
        "first_s": first,
        "floor_s": floor,
        "share_of_floor": floor / first,
        "back_s": second - first - further,
        "token_s": further,
        "planned_token_s": plan.token_seconds,
        "peak_gib": stats.get("peak_bytes_in_use", 0) / GIB,
        "planned_gib": (plan.peak_bytes - overhead) / GIB,
        "host_gib": plan.host_bytes / GIB,
    }


def _where(plan: CausalPlan) -> dict[str, Any]:
    if plan.layered is None:
        return {"keys": "pool", "rows": plan.rows, "kept": None, "kept_behind": None}
    layering = plan.layered.layering
    return {
        "keys": "host",
        "rows": layering.chunk,
        "kept": layering.kept,
        "kept_behind": layering.kept_behind,
    }


def main(arguments: Sequence[str]) -> None:
    """Time to the first token of one prompt, and of the tokens behind it, by tokens@memory.

    `python3 -m benchmarks causal_long [131072@24GiB 131072@76GiB 262144@40GiB 262144@76GiB]` on a card: a
    prompt in the KV pool, where the memory has room for it, or layer by layer with keys in host memory.
    `back_s` is what the second token takes longer than those behind it: keys come back to the device. Peaks
    are XLA's, without what is planned for the CUDA context. Each prompt runs in a process of its own; its
    first run compiles and is not counted, but where `--repeats 0` asks for no other. What cannot run is
    named, and stops no other.
    """
    parser = case_parser("causal_long", main.__doc__)
    parser.add_argument(
        "prompts", nargs="*", default=["131072@24GiB", "131072@76GiB", "262144@40GiB", "262144@76GiB"]
    )
    parser.add_argument("--shape", choices=CAUSAL_SHAPES, default="llama-3.1-8b")
    parser.add_argument("--host-memory", default="64GiB")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--child", action="store_true", help="measure one prompt here, and print a line")
    args = parser.parse_args(arguments)
    if args.child:
        length, _, memory = args.prompts[0].partition("@")
        sizes = args.host_memory, args.max_num_batched_tokens, args.tokens, args.repeats
        print(json.dumps(case(args.shape, int(length), memory, *sizes)), flush=True)
        return
    rows = args.max_num_batched_tokens
    name = f"causal_long_{args.shape}"
    record_apart("causal_long", args.prompts, arguments, name, args.out, max_num_batched_tokens=rows)
