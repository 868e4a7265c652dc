"""Evidence for the memory planner: what fits, how fast it plans, and whether a card agrees.

Run as `python3 -m benchmarks plan --part lmax [--out DIR]`. The parts `lmax`, `cards`, `latency`,
`average`, `ablation` and `mini_sequences` need no card; the others do.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.cases import case_parser
from benchmarks.planning import card
from benchmarks.planning.ablation import ablation
from benchmarks.planning.card import Row
from benchmarks.planning.mini_sequences import mini_sequences
from benchmarks.record import record
from benchmarks.shapes import SHAPES
from jdllm.models.config import ModelConfig
from jdllm.planning.aot import device_of, memory_of
from jdllm.planning.checks.exact import exact
from jdllm.planning.descriptions import described_targets
from jdllm.planning.plan import Budget, MemoryPlan, Workload, ladders, max_context, plan_memory
from jdllm.planning.planner import ActivationPlan, first_fit
from jdllm.planning.search import Ladders, brute_force, largest, search
from jdllm.planning.templates import step_template

GIB = 2**30
_OF_A_CARD = 0.95

# Longest contexts of the official PyTorch code and of our own compiled baseline, half of the tokens masked,
# measured on an H200 whose memory was limited to 24 and 40 GiB. The published sampler of LLaDA forms its
# confidences in float64; for the other two families the code as published was measured.
PEERS: dict[tuple[str, int], dict[str, int]] = {
    ("llada-8b", 24): {"official": 3072, "official_bf16": 12288, "compiled": 26624},
    ("llada-8b", 40): {"official": 8832, "official_bf16": 33792},
    ("dream-7b", 24): {"official": 10240, "compiled": 13312},
    ("llada-moe-7b", 24): {"official": 11264},
}


def lmax() -> list[Row]:
    """The longest context by budget, half of the rows masked, beside that of PyTorch."""
    table: list[Row] = []
    for shape, config in SHAPES.items():
        for gib in (24, 40, 80):
            workload, budget = Workload(config), Budget(gib * GIB)
            alone = max_context(workload, budget, host_tiers=False)
            tiered = max_context(workload, budget)
            host = plan_memory(workload, tiered, budget)
            peers = PEERS.get((shape, gib), {})
            table.append(
                {
                    "shape": shape,
                    "budget_gib": gib,
                    "context": alone,
                    "tiered_context": tiered,
                    "host_tiers": "+".join(host.host_tiers),
                    "host_gib": host.host_bytes / GIB,
                    **peers,
                    **{f"over_{name}": alone / length for name, length in peers.items()},
                }
            )
    return table


def cards() -> list[Row]:
    """The longest context on each described card, half of the rows masked, by kernels.

    The budget is 95 % of what the card has; behind the names of shapes stands what host memory adds.
    """
    table: list[Row] = []
    for target, kernels in itertools.product(sorted(described_targets(), key=memory_of), ("auto", "xla")):
        budget = Budget(int(_OF_A_CARD * memory_of(target)))
        row = {"target": target, "budget_gib": budget.device / GIB, "kernels": kernels}
        for shape, config in SHAPES.items():
            workload = Workload(config, device=device_of(target, kernels))
            row[shape] = max_context(workload, budget, host_tiers=False)
            row[f"{shape}_tiered"] = max_context(workload, budget)
        table.append(row)
    return table


def latency() -> list[Row]:
    """Median time of `plan_memory` on the device: instantiation, search and placement."""
    table: list[Row] = []
    for shape, config in SHAPES.items():
        workload = Workload(config)
        for gib in (20, 24, 40, 80):
            budget = Budget(gib * GIB)
            longest = max_context(workload, budget, host_tiers=False)
            for context in (4096, 32768, 131072, 400_000, longest):
                plan, seconds = timed(
                    functools.partial(plan_memory, workload, context, budget, host_tiers=False)
                )
                table.append(
                    {
                        "shape": shape,
                        "budget_gib": gib,
                        "context": context,
                        "is_longest": context == longest,
                        "fits": plan.fits,
                        "plan_ms": 1e3 * seconds,
                        **plan.activation.counts,
                    }
                )
    return table


def timed(run: Callable[[], Any], repeats: int = 9) -> tuple[Any, float]:
    """What `run` returns, and its median time in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return result, statistics.median(times)


def latency_exact() -> list[Row]:
    """Search against all combinations of short ladders, first fit against integer programming, in 24 GiB.

    At 131072 tokens, and at the longest context of the short ladders. All combinations are tried in rising
    order, until one fits: most of them near the longest context. Integer programming reaches no longer one
    where at the next context even its layout of the last graph of the search exceeds the budget.
    """
    return [_against(shape, context) for shape in SHAPES for context in (131072, None)]


def _against(shape: str, context: int | None) -> Row:
    workload, budget = Workload(SHAPES[shape]), Budget(24 * GIB)
    template = step_template(workload.config, workload.kind)
    place = functools.partial(_place, workload, budget)

    def plan(rows: int, how: Callable[..., ActivationPlan | None]) -> ActivationPlan | None:
        dims, short, free = place(rows)
        return how(template, dims, short, free)

    values = list(range(4096, 1 << 22, 4096))
    by_search = largest(lambda rows: (found := plan(rows, search)) is not None and found.fits, values) or 0
    by_force = largest(lambda rows: plan(rows, brute_force) is not None, values) or 0
    context = context or by_search
    found, search_seconds = timed(lambda: plan(context, search))
    _, force_seconds = timed(lambda: plan(context, brute_force), repeats=1)
    graph = template.instantiate({**place(context)[0], **found.counts})
    layout, fit_seconds = timed(lambda: first_fit(graph))
    optimum, exact_seconds = timed(lambda: exact(graph), repeats=1)
    beyond = plan(by_search + 4096, search)
    assert beyond is not None
    least = exact(template.instantiate({**place(by_search + 4096)[0], **beyond.counts}))
    return {
        "shape": shape,
        "context": context,
        "search_ms": 1e3 * search_seconds,
        "brute_force_ms": 1e3 * force_seconds,
        "combinations": math.prod(len(ladder) for ladder in place(context)[1].values()),
        "search_share": search_seconds / force_seconds,
        "longest_search": by_search,
        "longest_brute_force": by_force,
        "first_fit_ms": 1e3 * fit_seconds,
        "milp_ms": 1e3 * exact_seconds,
        "first_fit_share": fit_seconds / exact_seconds,
        "peak_over_milp": layout.peak / optimum.peak,
        "milp_longer": least.peak <= place(by_search + 4096)[2],
    }


def _place(workload: Workload, budget: Budget, rows: int) -> tuple[dict[str, int], Ladders, int]:
    """Dimensions, ladders of five values at most and free bytes for a context."""
    plan = plan_memory(workload, rows, budget, host_tiers=False)
    full = ladders(workload, plan.rows, plan.head_rows)
    short = {name: [ladder[i] for i in _spread(len(ladder))] for name, ladder in full.items()}
    return {"T": plan.rows, "M": plan.head_rows}, short, budget.device - plan.fixed_bytes


def _spread(count: int) -> list[int]:
    return sorted({round(i * (count - 1) / 4) for i in range(5)})


def average() -> list[Row]:
    """Peak over average of the activation memory in 24 GiB, with nothing cut and as planned.

    The average is over the operators of all layers and the head; every layer after the first is alike.
    """
    table: list[Row] = []
    budget = Budget(24 * GIB)
    for shape, config in SHAPES.items():
        workload = Workload(config)
        whole = functools.partial(_is_whole, workload, budget)
        longest_whole = largest(whole, range(128, 1 << 20, 128)) or 0
        longest = max_context(workload, budget, host_tiers=False)
        contexts = {"32k": 32768, "131k": 131072, "longest whole": longest_whole, "longest": longest}
        for name, context in contexts.items():
            plan = plan_memory(workload, context, budget, host_tiers=False)
            planned = _peak_to_average(workload, plan, dict(plan.activation.counts))
            uncut = _peak_to_average(workload, plan, dict.fromkeys(plan.activation.counts, 1))
            table.append(
                {
                    "shape": shape,
                    "which": name,
                    "context": context,
                    "uncut": uncut,
                    "planned": planned,
                    "lower_by": uncut / planned,
                    **plan.activation.counts,
                }
            )
    return table


def _is_whole(workload: Workload, budget: Budget, context: int) -> bool:
    plan = plan_memory(workload, context, budget, host_tiers=False)
    return plan.fits and set(plan.activation.counts.values()) == {1}


def _peak_to_average(workload: Workload, plan: MemoryPlan, counts: dict[str, int]) -> float:
    config: ModelConfig = workload.config
    template = step_template(config, workload.kind)
    graph = template.instantiate({"T": plan.rows, "M": plan.head_rows, **counts})
    # The template's second layer stands for all but the first.
    layers = [config.num_layers - 1 if op.startswith("layer 1 ") else 1 for op in graph.ops]
    return first_fit(graph).peak / float(np.average(graph.live_bytes, weights=layers))


PARTS: dict[str, Callable[[], list[Row]]] = {
    "lmax": lmax,
    "cards": cards,
    "latency": latency,
    "latency_exact": latency_exact,
    "average": average,
    "ablation": ablation,
    "mini_sequences": mini_sequences,
    "error": card.error,
    "cost": card.cost,
    "lazy": card.lazy,
    "allocators": card.allocators,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("plan", __doc__)
    parser.add_argument("--part", choices=(*PARTS, "longest"), required=True)
    parser.add_argument("--context", type=int, default=400_000, help="tokens of the part `longest`")
    args = parser.parse_args(arguments)
    table = card.longest(args.context) if args.part == "longest" else PARTS[args.part]()
    record(f"plan_{args.part}", table, args.out)
