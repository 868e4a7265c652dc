"""Longest contexts by plan without mask-only logits, without planned lifetimes and without chunks."""

import numpy as np
import pytest

from benchmarks.planning import ablation as module
from benchmarks.planning.ablation import CASES, Means, Unplanned, ablation, longest, plan
from benchmarks.shapes import SHAPES
from jdllm.planning.aot import device_of
from jdllm.planning.graph import GraphTemplate, ceil_div, dim
from jdllm.planning.plan import Budget, MemoryPlan, Workload, max_context, plan_memory
from jdllm.planning.search import search

GIB = 2**30
BUDGET = Budget(24 * GIB)
ALL, NOT_MASKED_ONLY, NO_MANAGER, WHOLE, MANAGER_ALONE, NONE = CASES


def workload(kernels: str = "xla", mask_ratio: float = 0.1) -> Workload:
    return Workload(SHAPES["llada-8b"], device=device_of("h200", kernels), mask_ratio=mask_ratio)


@pytest.fixture
def template() -> GraphTemplate:
    """Two layers of two operators, which hand a tensor on, and a head; `ffn` cuts the layers."""
    graph = GraphTemplate("test")
    graph.add_op("embed", outputs={"h": 256})
    for layer in ("layer 0", "layer 1"):
        part = ceil_div(dim("T"), dim("ffn")) * 256
        graph.add_op(f"{layer} up", ["h"], {f"{layer} wide": part}, owners=("ffn",))
        graph.add_op(f"{layer} down", [f"{layer} wide", "h"], {f"{layer} other": part}, scratch=512)
    graph.add_op("head", ["h"], scratch=1024)
    return graph


def test_tensors_of_a_layer_live_until_it_ends(template: GraphTemplate):
    graph = Unplanned(template).instantiate({"T": 8, "ffn": 2})
    layer = 256 + 4 * 256 + 4 * 256 + 512
    assert graph.live_bytes.tolist() == [256, layer, layer, layer, layer, 256 + 1024]
    assert template.instantiate({"T": 8, "ffn": 2}).live_bytes.tolist()[1] == 256 + 4 * 256


def test_several_counts_are_tried_at_once(template: GraphTemplate):
    graph = Unplanned(template)
    counts = np.array([1, 2, 4])
    found = graph.live_bytes({"T": 8, "ffn": counts})
    singly = [graph.live_bytes({"T": 8, "ffn": int(count)}) for count in counts]
    np.testing.assert_array_equal(found, np.stack(singly, axis=1))


def test_a_search_raises_the_count_of_any_operator_of_the_layer(template: GraphTemplate):
    """Also where the operator with most bytes has none: its layer's other tensors are alive."""
    found = search(Unplanned(template), {"T": 8}, {"ffn": [1, 2, 4, 8]}, 256 + 512 + 2 * 256 * 2)
    assert (found.fits, found.counts) == (True, {"ffn": 4})


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_with_all_means_it_is_the_plan_of_the_planner(kernels: str):
    asked = workload(kernels)
    assert longest(asked, BUDGET, ALL) == max_context(asked, BUDGET, host_tiers=False)
    expected = plan_memory(asked, 100_000, BUDGET, host_tiers=False).activation
    found = plan(asked, 100_000, BUDGET, ALL)
    assert (found.peak_bytes, found.counts) == (expected.peak_bytes, expected.counts)


def test_without_mask_only_logits_all_rows_meet_the_head():
    few, many = workload(mask_ratio=0.1), workload(mask_ratio=1.0)
    whole = plan(few, 4096, BUDGET, NOT_MASKED_ONLY).peak_bytes
    assert whole == plan(many, 4096, BUDGET, ALL).peak_bytes
    assert whole > plan(few, 4096, BUDGET, ALL).peak_bytes + 4096 * 126_464 * 2


def test_nothing_is_cut_without_lazy_chunking():
    for means in (WHOLE, MANAGER_ALONE, NONE):
        assert set(plan(workload(), 32768, BUDGET, means).counts.values()) == {1}


def test_each_of_the_means_is_worth_something():
    contexts = {means: longest(workload(), BUDGET, means) for means in CASES}
    assert contexts[NONE] <= contexts[MANAGER_ALONE] < contexts[WHOLE] < contexts[ALL]
    assert contexts[NO_MANAGER] < contexts[ALL]


def test_the_table_has_every_case_at_every_ratio(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, ...]] = []

    def compiler(workload: Workload, plan: MemoryPlan, target: str) -> int:
        asked.append((plan.rows, plan.head_rows, plan.chunks.logits))
        return GIB

    monkeypatch.setattr(module, "compiler_temp_bytes", compiler)
    rows = ablation()
    assert {row["compiler_gib_at_32768"] for row in rows if row["manager"] == "on"} == {1.0}
    assert {row["compiler_gib_at_32768"] for row in rows if row["manager"] == "off"} == {None}
    assert (32768, 32768, 1) in asked  # nothing is cut, and all rows meet the head
    assert len(rows) == 2 * 3 * len(CASES)
    first = [row for row in rows if row["mask_only_logits"] == row["manager"] == row["lazy_chunking"] == "on"]
    assert [row["of_all"] for row in first] == [1.0] * 6
    assert Means() == ALL
