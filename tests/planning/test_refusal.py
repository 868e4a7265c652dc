"""The refusal of a step that does not fit: what it names is more than the budget, enough, and least."""

import dataclasses
import itertools
import re
from typing import Any

import pytest

from benchmarks.shapes import SHAPES
from jdllm.byte_sizes import parse_bytes
from jdllm.execution.offload.tiers import HostTiers
from jdllm.planning.budget import Budget, MemoryBudgetError
from jdllm.planning.plan import MemoryPlan, Workload, check, max_context, plan_memory, refusal, rungs

GIB = 2**30
CONTEXTS = (1, 131072, 5_000_000)
DEVICES = (1.0, 15.9, 24.0)


def refused(
    workload: Workload, context: int, budget: Budget, tiers: list[HostTiers]
) -> MemoryBudgetError | None:
    plan = plan_memory(workload, context, budget, host_tiers=tiers)
    return None if plan.fits else refusal(workload, plan.bucket, plan.room, tiers)


def refusal_of(workload: Workload, plan: MemoryPlan, **asked: Any) -> MemoryBudgetError:
    return refusal(workload, plan.bucket, plan.room, [], **asked)


@pytest.mark.parametrize("ratio", [0.05, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=pytest.mark.slow if s == "dream-7b" else ()) for s in SHAPES]
)
def test_the_need_exceeds_the_budget_and_is_enough_and_least(shape: str, ratio: float):
    config = SHAPES[shape]
    workload = Workload(config, mask_ratio=ratio)
    refusals = 0
    for context, gib, host in itertools.product(CONTEXTS, DEVICES, (0, 64 * GIB)):
        budget = Budget(int(gib * GIB), host=host)
        tiers = rungs(config) if host else []
        error = refused(workload, context, budget, tiers)
        if error is None:
            continue
        refusals += 1

        def plan(device: int, context: int = context, budget: Budget = budget, tiers=tiers) -> MemoryPlan:
            return plan_memory(
                workload, context, dataclasses.replace(budget, device=device), host_tiers=tiers
            )

        printed = re.search(r"at least (\S+ GiB) on the device.* budget is (\S+ GiB):", str(error))
        assert printed is not None
        need, available = parse_bytes(printed[1]), parse_bytes(printed[2])
        assert error.needed_bytes > error.available_bytes == budget.device
        assert need > available
        assert plan(error.needed_bytes).fits
        assert plan(need).fits
        assert not plan(int(0.99 * error.needed_bytes)).fits
        longest = f"the longest context that fits is {error.max_context} tokens"
        assert str(error).endswith(longest if error.max_context else "no context fits")
    assert refusals > len(CONTEXTS)


def test_the_longest_context_is_for_the_same_share_of_masks():
    few = Workload(SHAPES["llada-8b"], mask_ratio=0.05)
    many = dataclasses.replace(few, mask_ratio=1.0)
    nothing = Budget(GIB, host=0)
    least, most = (
        refusal_of(workload, plan_memory(workload, 131072, nothing)).needed_bytes for workload in (few, many)
    )
    assert least < most
    budget = Budget((least + most) // 2, host=0)
    assert max_context(few, budget) >= 131072
    assert refusal_of(few, plan_memory(many, 131072, budget)).max_context < 131072


def test_a_surplus_that_the_compiler_asks_for_is_part_of_the_need():
    workload, budget = Workload(SHAPES["llada-8b"]), Budget(17 * GIB, host=0)
    plan = plan_memory(workload, 131072, budget)
    alone = refusal_of(workload, plan)
    assert refusal_of(workload, plan, surplus=GIB).needed_bytes == alone.needed_bytes + GIB
    assert refusal_of(workload, plan, compiled=99 * GIB).needed_bytes == plan.room.held + 99 * GIB


def test_a_plan_is_checked():
    workload = Workload(SHAPES["llada-8b"])
    fitting = plan_memory(workload, 4096, Budget(24 * GIB))
    assert check(workload, fitting) is fitting
    with pytest.raises(MemoryBudgetError, match=r"at least 1\d\.\d\d GiB"):
        check(workload, plan_memory(workload, 4096, Budget(8 * GIB)))
