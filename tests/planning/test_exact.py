"""The integer program against every order of small graphs, and `first_fit` against it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.planning.checks.exact import exact
from jdllm.planning.graph import Graph
from jdllm.planning.planner import first_fit
from tests.planning.test_graph import WHOLE, llada_like
from tests.planning.test_planner import WASTEFUL, assert_sound, blocks


def lowest_of_all_orders(graph: Graph) -> int:
    """The lowest peak of placing the tensors as low as possible in any order, which is the optimum."""

    def peak(order: tuple[int, ...]) -> int:
        taken: dict[int, range] = {}
        for i in order:
            beside = [
                taken[j] for j in taken if graph.first[i] <= graph.last[j] and graph.first[j] <= graph.last[i]
            ]
            size = int(graph.sizes[i])
            starts = sorted({0, *(other.stop for other in beside)})
            start = next(s for s in starts if all(s + size <= o.start or s >= o.stop for o in beside))
            taken[i] = range(start, start + size)
        return max(place.stop for place in taken.values())

    return min(map(peak, itertools.permutations(range(len(graph.tensors)))))


lifetimes = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 4)).map(
        lambda b: (b[0], b[1], b[1] + b[2])
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25)
@given(lifetimes)
def test_the_integer_program_finds_the_lowest_layout(lifetimes):
    graph = blocks(lifetimes)
    layout = exact(graph)
    assert_sound(graph, layout)
    assert layout.peak == lowest_of_all_orders(graph)


def test_it_knows_where_the_bound_is_out_of_reach():
    graph = blocks(WASTEFUL)
    assert graph.lower_bound == 8 * 256
    assert exact(graph).peak == lowest_of_all_orders(graph) == 9 * 256


@pytest.mark.parametrize("counts", [{}, {"ffn": 3, "query": 5, "kv": 3}, {"heads": 8, "logits": 40}])
def test_first_fit_needs_no_more_for_a_model(counts: dict[str, int]):
    graph = llada_like().instantiate({**WHOLE, "T": 30011, "M": 9999, **counts})
    layout = exact(graph)
    assert_sound(graph, layout)
    assert first_fit(graph).peak == layout.peak


def test_time_that_runs_out_is_an_error():
    with pytest.raises(TimeoutError, match="no layout of 36 tensors within 0"):
        exact(llada_like().instantiate({**WHOLE, "T": 5000, "M": 5000, "query": 3}), time_limit=0)
