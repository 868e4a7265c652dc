"""Plans of the published shapes for random contexts, masked rows and budgets."""

import functools
import itertools

import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.models.weights import param_bytes
from jdllm.planning.buckets import row_bucket
from jdllm.planning.plan import Budget, MemoryPlan, Workload, ladders, max_context, plan_memory
from jdllm.planning.templates import step_template

GIB = 2**30
# A few of each, so that longest contexts are computed once for many triples.
BUDGETS = [int(gib * GIB) for gib in (8, 15.5, 16.5, 18, 24, 32, 48, 80)]
RATIOS = (0.05, 0.5, 0.9, 1.0)


@functools.cache
def longest(workload: Workload, budget: Budget) -> int:
    """`max_context`, checked: it fits, and the next value of its ladder does not."""
    found = max_context(workload, budget, host_tiers=False)
    beyond = row_bucket(found + 1)
    assert found == 0 or plan_memory(workload, found, budget, host_tiers=False).fits
    assert not plan_memory(workload, beyond, budget, host_tiers=False).fits
    return found


def assert_placed(plan: MemoryPlan):
    """No two tensors share bytes while both are alive, and the placement wastes at most two percent."""
    tensors = [t for t in plan.activation.tensors if t.bytes]
    low, size, first, last = np.array([(t.offset, t.bytes, t.first, t.last) for t in tensors]).T
    together = (first[:, None] <= last) & (first <= last[:, None])
    shared = (low[:, None] < low + size) & (low < (low + size)[:, None])
    np.fill_diagonal(shared, False)
    assert not (together & shared).any()
    assert low.min() >= 0
    assert plan.activation.peak_bytes == (low + size).max()

    ops = np.arange(len(plan.activation.ops))[:, None]
    alive = ((first <= ops) & (ops <= last)) @ size
    assert alive.max() <= plan.activation.peak_bytes <= 1.02 * alive.max()


def assert_nothing_fits(workload: Workload, plan: MemoryPlan, draw: np.random.Generator):
    """Random counts need more than the budget leaves, by the bytes that are alive alone."""
    columns = ladders(workload, plan.rows, plan.head_rows)
    counts = {name: draw.choice(np.array(ladder, np.int64), 64) for name, ladder in columns.items()}
    template = step_template(workload.config, workload.kind)
    live = template.live_bytes({"T": plan.rows, "M": plan.head_rows, **counts})
    assert live.max(axis=0).min() > plan.budget.device - plan.fixed_bytes


def check_triples(seed: int, count: int):
    draw = np.random.default_rng(seed)
    shapes = itertools.cycle(SHAPES.values())
    accepted = 0
    for config in itertools.islice(shapes, count):
        context = int(2 ** draw.uniform(0, 23))
        workload = Workload(config, mask_ratio=float(draw.choice(RATIOS)))
        budget = Budget(int(draw.choice(BUDGETS)))
        plan = plan_memory(workload, context, budget, host_tiers=False)
        assert_placed(plan)
        used = budget.overhead + param_bytes(config, "bfloat16") + plan.activation.peak_bytes
        if plan.fits:
            accepted += 1
            assert used <= budget.device
        else:
            assert row_bucket(context) > longest(workload, budget)
            assert_nothing_fits(workload, plan, draw)
    assert 0.1 * count < accepted < 0.95 * count, "both outcomes are tried"


@pytest.mark.slow
def test_random_triples_fit_or_are_refused_rightly():
    check_triples(seed=0, count=500)


@pytest.mark.slow
def test_ten_thousand_random_triples():
    check_triples(seed=1, count=10_000)
