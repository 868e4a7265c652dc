"""The parts of the case `plan` that run steps on a card, with random weights.

The peak statistic of a process is never reset, so a measured peak has a process for itself:
`python3 -m benchmarks plan_peak JSON` prints one line of JSON.
"""

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.cases import case_parser
from benchmarks.shapes import SHAPES
from benchmarks.tiers import random_params
from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables, temp_bytes
from jdllm.decoding.batch import Batch
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params
from jdllm.pallas.device import target
from jdllm.pallas.masked_logits import Level
from jdllm.planning.budget import DEFAULT_OVERHEAD
from jdllm.planning.ladder import bucket_entry
from jdllm.planning.plan import Budget, MemoryPlan, Workload, check, plan_memory
from jdllm.serving.packing import demand, pack
from jdllm.serving.request import Request
from jdllm.serving.spec import generation_spec

GIB, MIB = 2**30, 2**20
Row = dict[str, float | int | str]


class Case(NamedTuple):
    """A step to measure: the first `layers` layers of a shape, planned for a budget of their own."""

    shape: str
    layers: int
    context: int
    mask_ratio: float
    budget_gib: float


# Layers do not change the peak: two show it, and budgets are smaller by the weights of the others.
ERROR_CASES = [
    Case("llada-8b", 2, 4096, 0.5, 5),
    Case("llada-8b", 2, 32768, 0.9, 10),
    Case("llada-8b", 2, 131072, 0.1, 6),
    Case("llada-8b", 2, 131072, 0.5, 12),
    Case("dream-7b", 2, 4096, 0.9, 8),
    Case("dream-7b", 2, 32768, 0.1, 5),
    Case("dream-7b", 2, 50000, 0.5, 8),
    Case("dream-7b", 2, 131072, 0.5, 6),
    Case("llada-moe-7b", 2, 4096, 0.1, 5),
    Case("llada-moe-7b", 2, 32768, 0.5, 8),
    Case("llada-moe-7b", 2, 50000, 0.9, 6),
    Case("llada-moe-7b", 2, 131072, 0.9, 5),
]
ALLOCATOR_CASE = Case("llada-8b", 4, 131072, 0.5, 10)
ALLOCATORS = {
    "bfc, fraction": {},
    "bfc, growing": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    "cuda_async": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"},
    "vmm": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"},
}


def error() -> list[Row]:
    """The planned against the measured peak of one step, four cases at a time."""
    growing = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda case: in_process(case, growing), ERROR_CASES))


def allocators() -> list[Row]:
    """What each of XLA's allocators takes from the card for one planned step."""
    total = card_bytes("memory.total")
    fraction = (ALLOCATOR_CASE.budget_gib * GIB - DEFAULT_OVERHEAD) / total
    limit = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.5f}"}
    return [
        {"allocator": name, **in_process(ALLOCATOR_CASE, limit | env)} for name, env in ALLOCATORS.items()
    ]


def in_process(case: Case, environment: Mapping[str, str]) -> Row:
    """The result of `step_memory` in a process of its own, or how that failed."""
    command = [sys.executable, "-m", "benchmarks", "plan_peak", json.dumps(case)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = [line for line in done.stderr.splitlines() if "Error: " in line] or [f"exit {done.returncode}"]
    return {
        **case._asdict(),
        "out_of_memory": "RESOURCE_EXHAUSTED" in done.stderr,
        "failure": lines[-1][:300],
    }


def step_memory(case: Case) -> Row:
    """Run one step, compiled before the weights exist so that autotuning does not hide the step's peak."""
    config = dataclasses.replace(SHAPES[case.shape], num_layers=case.layers)
    plan = planned(config, case.context, case.mask_ratio, case.budget_gib)
    step, batch = compiled_step(config, case.context, case.mask_ratio, plan.chunks)
    params = random_params(config)
    before = statistics_of_memory()
    jax.block_until_ready(step(params, batch, np.int32(1)))
    after = statistics_of_memory()
    peak = after.get("peak_bytes_in_use", math.nan)
    hidden = peak <= before.get("peak_bytes_in_use", math.nan)
    measured = math.nan if hidden else peak - before.get("bytes_in_use", math.nan)
    expected = plan.activation.peak_bytes + trace_bytes(batch)
    pool = after.get("peak_pool_bytes") or after.get("pool_bytes") or after.get("bytes_reserved")
    reserved = pool or card_bytes("memory.used") - DEFAULT_OVERHEAD
    return {
        **case._asdict(),
        **plan.activation.counts,
        "planned_mib": expected / MIB,
        "compiled_temp_mib": temp_bytes(step) / MIB,
        "measured_mib": measured / MIB,
        "measured_over_planned": measured / expected,
        "within_bar": abs(measured - expected) <= 0.05 * expected + 64 * MIB,
        "plan_in_all_gib": (plan.peak_bytes - plan.budget.overhead) / GIB,
        "peak_in_all_gib": peak / GIB,
        "reserved_gib": reserved / GIB,
        "reserved_from": "pool" if pool else "card",
        "reserved_over_plan": reserved / (plan.peak_bytes - plan.budget.overhead),
        "out_of_memory": False,
    }


def planned(config: ModelConfig, context: int, mask_ratio: float, budget_gib: float) -> MemoryPlan:
    """The plan of a step on this device without host tiers; `MemoryBudgetError` where it does not fit."""
    workload = Workload(config, device=target(), mask_ratio=mask_ratio)
    return check(workload, plan_memory(workload, context, Budget(int(budget_gib * GIB)), host_tiers=False))


def compiled_step(
    config: ModelConfig, context: int, mask_ratio: float, chunks: ChunkConfig
) -> tuple[Any, Batch]:
    """The executable for a request of `context` tokens in one block, and its batch on the device."""
    masked = round(context * mask_ratio)
    prompt = np.random.default_rng(0).integers(0, 100_000, context - masked)
    request = Request(generation_spec(prompt, SamplingParams(gen_length=masked), config))
    batch = jax.device_put(pack([request], config, bucket_entry(*demand(request))).batch)
    static = {"config": config, "mask_id": config.mask_id, "chunks": chunks, "level": Level.TOP}
    executables = Executables(jax.devices()[0].platform)
    params = abstract_params(config, "bfloat16")
    return executables.compile(denoise, params, batch, np.int32(1), **static), batch


def trace_bytes(batch: Batch) -> int:
    """Bytes of the trace that a dispatch returns: a token and a flag for each step and head row."""
    return 5 * batch.segments.quota.shape[1] * batch.head.row.shape[0]


def statistics_of_memory() -> dict[str, Any]:
    return jax.devices()[0].memory_stats() or {}


def card_bytes(field: str) -> float:
    """A memory figure of the card from its driver, which reports MiB; not a number without the driver."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return math.nan
    return MIB * float(done.stdout.split()[0])


def cost(rows: int = 32768) -> list[Row]:
    """What each count costs at 32768 rows of LLaDA-8B, half masked.

    Head and feed-forward layer are measured with all layers. For the slower compilations eight layers run,
    and what they take longer is extrapolated to all layers, so that the head has its weight.
    """
    full, part = SHAPES["llada-8b"], dataclasses.replace(SHAPES["llada-8b"], num_layers=8)
    whole = step_seconds(
        full,
        rows,
        {
            "unplanned": ChunkConfig(),
            "logits 4": ChunkConfig(logits=4),
            "ffn 4": ChunkConfig(ffn=4),
        },
    )
    fewer = step_seconds(
        part,
        rows,
        {
            "unplanned": ChunkConfig(),
            "query, kv 4": ChunkConfig(query=4, kv=4),
            "heads 4": ChunkConfig(heads=4),
        },
    )
    table = _cost_rows(whole, full.num_layers, 1, whole["unplanned"])
    return table + _cost_rows(fewer, part.num_layers, full.num_layers // part.num_layers, whole["unplanned"])


def _cost_rows(seconds: Mapping[str, float], layers: int, factor: int, step: float) -> list[Row]:
    """A row for each variant; `factor` times its extra time over a whole `step` is its cost."""
    return [
        {
            "counts": name,
            "layers": layers,
            "step_ms": 1e3 * value,
            "over_unplanned": 1 + factor * (value - seconds["unplanned"]) / step,
        }
        for name, value in seconds.items()
    ]


def lazy() -> list[Row]:
    """The planned step of LLaDA-8B in 24 GiB against 32 chunks of everything but the heads.

    Groups of single heads would leave most of the card idle, and flatter the plan.
    """
    config = SHAPES["llada-8b"]
    most = ChunkConfig(ffn=32, query=32, kv=32, logits=32)
    table: list[Row] = []
    for context in (8192, 32768):
        chunks = planned(config, context, 0.5, 24).chunks
        seconds = step_seconds(config, context, {"planned": chunks, "most": most})
        table.append(
            {
                "context": context,
                **dataclasses.asdict(chunks),
                "planned_ms": 1e3 * seconds["planned"],
                "most_ms": 1e3 * seconds["most"],
                "most_over_planned": seconds["most"] / seconds["planned"],
            }
        )
    return table


def step_seconds(
    config: ModelConfig, rows: int, variants: Mapping[str, ChunkConfig], rounds: int = 3
) -> dict[str, float]:
    """Median time of a step, half masked, with each of some chunk counts, which take turns."""
    steps = {name: compiled_step(config, rows, 0.5, chunks) for name, chunks in variants.items()}
    params = random_params(config)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(1 + rounds):
        for name, (step, batch) in steps.items():
            times[name].append(_seconds(lambda step=step, batch=batch: step(params, batch, np.int32(1))))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def longest(context: int) -> list[Row]:
    """One step of all layers of LLaDA-8B in 24 GiB, half masked.

    The caller limits the process by XLA_PYTHON_CLIENT_MEM_FRACTION; raises `SystemExit` above 24 GiB.
    """
    config, limit = SHAPES["llada-8b"], statistics_of_memory().get("bytes_limit", math.nan)
    print(f"bytes_limit: {limit / GIB:.3f} GiB", flush=True)
    if limit > 24 * GIB:
        raise SystemExit("the limit is above 24 GiB: lower XLA_PYTHON_CLIENT_MEM_FRACTION")
    plan = planned(config, context, 0.5, 24)
    print(
        f"plan: {plan.peak_bytes / GIB:.3f} GiB, of these {plan.budget.overhead / GIB:.2f} outside XLA,"
        f" {plan.chunks}"
    )
    step, batch = compiled_step(config, context, 0.5, plan.chunks)
    temporaries = temp_bytes(step)
    print(f"compiled temporaries: {temporaries / GIB:.3f} GiB", flush=True)
    params = random_params(config)
    seconds = _seconds(lambda: step(params, batch, np.int32(1)))
    return [
        {
            "context": context,
            "rows": plan.rows,
            **dataclasses.asdict(plan.chunks),
            "limit_gib": limit / GIB,
            "plan_gib": (plan.peak_bytes - plan.budget.overhead) / GIB,
            "planned_activation_gib": plan.activation.peak_bytes / GIB,
            "compiled_temp_gib": temporaries / GIB,
            "peak_gib": statistics_of_memory().get("peak_bytes_in_use", math.nan) / GIB,
            "step_s": seconds,
        }
    ]


def print_peak(arguments: Sequence[str]) -> None:
    """Print what `step_memory` says of a case: `python3 -m benchmarks plan_peak JSON`."""
    parser = case_parser("plan_peak", print_peak.__doc__, records=False)
    parser.add_argument("case", type=json.loads, help="the values of a `Case`")
    print(json.dumps(step_memory(Case(*parser.parse_args(arguments).case))))
