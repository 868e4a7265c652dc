"""Layouts: no overlap, close to the lower bound, and the plan made of them."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.planning.graph import Graph, GraphTemplate, Size, dim
from jdllm.planning.planner import Layout, first_fit, make_plan
from tests.planning.test_graph import WHOLE, llada_like

Block = tuple[int, int, int]

# Seven blocks (units, first, last) of which 8 units are alive at once at most, and no layout needs under 9.
WASTEFUL: list[Block] = [(4, 1, 3), (4, 6, 6), (3, 2, 5), (1, 3, 4), (1, 4, 5), (4, 1, 1), (4, 5, 6)]

# 8 units alive at once at most; placed by falling size these need 9.
MISSED: list[Block] = [(3, 2, 4), (2, 1, 3), (4, 4, 4), (3, 0, 3)]


def blocks(lifetimes: list[Block]) -> Graph:
    """A graph of tensors given as (units of 256 bytes, first, last)."""
    return block_template(lifetimes, dim("unit")).instantiate({"unit": 256})


def block_template(lifetimes: list[Block], unit: Size) -> GraphTemplate:
    """Operators that live exactly so long; what lowers a unit owns them all."""
    template = GraphTemplate("blocks")
    for op in range(max(last for _, _, last in lifetimes) + 1):
        read = [f"t{i}" for i, (_, first, last) in enumerate(lifetimes) if first < op == last]
        written = {f"t{i}": units * unit for i, (units, first, _) in enumerate(lifetimes) if first == op}
        template.add_op(f"op{op}", read, written, owners=sorted(unit.dims))
    return template


def assert_sound(graph: Graph, layout: Layout):
    placed = list(zip(graph.first, graph.last, layout.offsets, graph.sizes.tolist(), strict=True))
    for i, (first, last, offset, size) in enumerate(placed):
        assert offset >= 0
        assert offset % 256 == 0
        for other_first, other_last, other_offset, other_size in placed[:i]:
            apart = last < other_first or other_last < first
            assert apart or offset + size <= other_offset or other_offset + other_size <= offset
    assert layout.peak == max(offset + size for _, _, offset, size in placed)
    assert layout.peak >= graph.lower_bound


lifetimes = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)).map(
        lambda b: (b[0], b[1], b[1] + b[2])
    ),
    min_size=1,
    max_size=14,
)


@given(lifetimes)
def test_tensors_that_live_together_never_overlap(lifetimes: list[Block]):
    graph = blocks(lifetimes)
    assert_sound(graph, first_fit(graph))


def test_the_largest_goes_to_the_bottom_and_gaps_are_filled():
    graph = blocks([(1, 0, 4), (4, 0, 1), (3, 2, 3), (1, 2, 4)])
    # By size: 4 at the bottom, 3 under it in time, then the two small ones: the first above the 4, the
    # second in the gap of one unit that the 3 leaves below it.
    order = dict(zip(graph.tensors, (offset // 256 for offset in first_fit(graph).offsets), strict=True))
    assert order == {"t1": 0, "t2": 0, "t0": 4, "t3": 3}


def test_an_order_is_searched_where_the_largest_first_misses_the_bound():
    graph = blocks(MISSED)
    assert first_fit(graph).peak == graph.lower_bound == 8 * 256
    assert_sound(graph, first_fit(graph))


def test_a_bound_out_of_reach_is_survived():
    graph = blocks(WASTEFUL)
    assert graph.lower_bound == 8 * 256
    layout = first_fit(graph)
    assert_sound(graph, layout)
    assert layout.peak == 9 * 256


def test_hundreds_of_tensors_alive_at_once_are_placed():
    graph = blocks([*WASTEFUL, *[(1, 0, 6)] * 400])
    assert_sound(graph, first_fit(graph))


def test_almost_every_random_graph_reaches_its_bound():
    draw = random.Random(0)
    reached = 0
    for _ in range(200):
        starts = [draw.randrange(20) for _ in range(30)]
        graph = blocks([(draw.randint(1, 100), start, start + draw.randrange(6)) for start in starts])
        layout = first_fit(graph)
        assert_sound(graph, layout)
        reached += layout.peak == graph.lower_bound
    assert reached >= 190


def test_a_model_is_within_two_percent_of_its_bound():
    draw = random.Random(1)
    template = llada_like()
    for _ in range(300):
        rows = int(2 ** draw.uniform(6, 18))
        counts = {name: int(2 ** draw.uniform(0, 6)) for name in WHOLE}
        graph = template.instantiate({**counts, "T": rows, "M": max(1, int(rows * draw.random()))})
        layout = first_fit(graph)
        assert_sound(graph, layout)
        assert layout.peak <= 1.02 * graph.lower_bound


def test_two_layers_need_what_all_layers_need():
    dims = {"T": 20000, "M": 3000, "ffn": 3, "query": 5, "kv": 3, "heads": 1, "logits": 2}
    two, all_layers = llada_like().instantiate(dims), llada_like(32).instantiate(dims)
    assert first_fit(all_layers).peak == first_fit(two).peak == all_layers.lower_bound


def test_a_plan_says_what_its_graph_and_layout_say():
    graph = blocks([(4, 0, 1), (2, 1, 2), (2, 2, 3)])
    plan = make_plan(graph, {"unit": 256}, "fits", Layout((0, 1024, 0), 1536))
    assert plan.fits
    assert (plan.peak_bytes, plan.peak_op, plan.lower_bound) == (1536, "op1", 1536)
    assert plan.average_bytes == 256 * (4 + 6 + 4 + 2) / 4
    assert plan.peak_to_average == 6 / 4
    assert plan.counts == {"unit": 256}
    assert plan.ops == ("op0", "op1", "op2", "op3")
    assert plan.tensors[1]._asdict() == {
        "name": "t1",
        "bytes": 512,
        "first": 1,
        "last": 2,
        "offset": 1024,
        "cut_by": ("unit",),
    }
    assert not make_plan(graph, {}, "op1: too much", Layout((0, 1024, 0), 1536)).fits
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.peak_bytes = 0  # type: ignore[misc]


def test_a_step_without_bytes_has_a_plan():
    graph = blocks([(0, 0, 1)])
    plan = make_plan(graph, {}, "fits", first_fit(graph))
    assert (plan.peak_bytes, plan.average_bytes, plan.peak_to_average) == (0, 0, 1)
