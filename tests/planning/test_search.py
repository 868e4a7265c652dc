"""Lazy chunking against unit steps, against every combination, and against exact layouts."""

import itertools
import random
import timeit
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.planning.checks.exact import exact
from jdllm.planning.graph import GraphTemplate, ceil_div, dim, maximum, minimum
from jdllm.planning.planner import ActivationPlan, first_fit
from jdllm.planning.search import brute_force, largest, search
from tests.planning.test_graph import WHOLE, llada_like
from tests.planning.test_planner import WASTEFUL, block_template

Ladders = Mapping[str, Sequence[int]]

LADDERS: Ladders = {
    "ffn": range(1, 513),
    "query": range(1, 513),
    "kv": range(1, 513),
    "heads": (1, 4, 8, 16, 32),
    "logits": range(1, 4097),
}
# Bytes of three times the residual of 32768 rows of 4096 in bf16, and 2 % more.
THREE_RESIDUALS = 3 * 32768 * 8192 * 102 // 100
SMALL: Ladders = {
    "ffn": (1, 2, 4),
    "query": (1, 2, 3, 6),
    "kv": (1, 3),
    "heads": (1, 4, 16),
    "logits": (1, 3, 9),
}


def by_unit_steps(
    template: GraphTemplate, dims: Mapping[str, int], ladders: Ladders, budget: int
) -> tuple[dict[str, int], bool]:
    """The counts that the rule reaches one step at a time, and whether they fit."""
    level = dict.fromkeys(ladders, 0)

    def live(op: int | None = None, at_end: str | None = None) -> np.ndarray:
        counts = {name: ladders[name][-1 if name == at_end else i] for name, i in level.items()}
        return template.instantiate({**dims, **counts}).live_bytes[op]

    def choice(op: int, limit: int) -> str | None:
        owners = [owner for owner in template.owners[op] if owner in ladders]
        enough = [owner for owner in owners if live(op, owner) <= limit]
        helpful = [owner for owner in owners if live(op, owner) < live(op)]
        return enough[0] if enough else helpful[-1] if helpful else None

    limit = budget
    while True:
        counts = {name: ladders[name][i] for name, i in level.items()}
        graph = template.instantiate({**dims, **counts})
        if graph.lower_bound <= limit:
            if first_fit(graph).peak <= budget:
                return counts, True
            limit = graph.lower_bound - 1
        owner = choice(graph.ops.index(graph.peak_op), limit)
        if owner is None:
            return counts, first_fit(graph).peak <= budget
        level[owner] += 1


def assert_keeps(plan: ActivationPlan, budget: int):
    """A plan that says it fits does, and its tensors lie apart."""
    assert plan.lower_bound <= plan.peak_bytes <= 1.02 * plan.lower_bound
    assert plan.fits == (plan.peak_bytes <= budget)
    tensors = plan.tensors
    first, last, start, size = (
        np.array(x) for x in zip(*((t[2], t[3], t[4], t[1]) for t in tensors), strict=True)
    )
    together = (first[:, None] <= last) & (first <= last[:, None])
    overlap = (
        (start[:, None] < start + size) & (start < (start + size)[:, None]) & (size > 0) & (size[:, None] > 0)
    )
    assert not (together & overlap & ~np.eye(len(tensors), dtype=bool)).any()


def request(draw: random.Random) -> tuple[dict[str, int], int]:
    """Random rows and masked rows, and a budget from hopeless to ample."""
    rows = int(2 ** draw.uniform(5, 18))
    dims = {"T": rows, "M": max(1, int(rows * draw.random()))}
    residual = llada_like().instantiate({**WHOLE, **dims}).sizes[1]
    return dims, int(
        residual * draw.choice((draw.uniform(2.7, 3.2), draw.uniform(3, 8), draw.uniform(1, 40)))
    )


@st.composite
def problems(draw):
    """Small random templates over two row counts and three chunk counts, with ladders and a budget."""
    names = ("a", "b", "c")
    chunks = [ceil_div(dim("T"), dim(name)) for name in names]
    # The last adds a buffer as soon as its count is above the first.
    sizes = [
        *chunks,
        maximum(chunks[0], chunks[1]),
        chunks[1] * chunks[2],
        chunks[2] + minimum(dim("c") + -1, 1) * 40,
    ]
    template = GraphTemplate("random")
    known: list[str] = []
    for op in range(draw(st.integers(1, 6))):
        reads = draw(st.lists(st.sampled_from(known), max_size=3, unique=True)) if known else []
        written = {}
        for i in range(draw(st.integers(1, 3))):
            written[f"t{op}.{i}"] = draw(st.sampled_from(sizes)) * 256 * draw(st.integers(1, 4))
        owners = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
        template.add_op(f"op{op}", reads, written, owners=owners)
        known += written
    ladders = {name: tuple(sorted({1, *draw(st.lists(st.integers(2, 60), max_size=25))})) for name in names}
    dims = {"T": draw(st.integers(1, 80))}
    whole = template.instantiate({**dims, "a": 1, "b": 1, "c": 1}).lower_bound
    return template, dims, ladders, draw(st.integers(0, whole + 256))


@pytest.mark.slow
@settings(max_examples=300)
@given(problems())
def test_jumps_reach_what_unit_steps_reach(problem):
    plan = search(*problem)
    assert (plan.counts, plan.fits) == by_unit_steps(*problem)


def test_jumps_reach_what_unit_steps_reach_for_a_model():
    draw = random.Random(2)
    for _ in range(15):
        dims, budget = request(draw)
        ladders = {**LADDERS, "ffn": range(1, 65), "query": range(1, 65), "kv": range(1, 65)}
        plan = search(llada_like(), dims, ladders, budget)
        assert (plan.counts, plan.fits) == by_unit_steps(llada_like(), dims, ladders, budget)


def test_it_fits_whenever_some_combination_does():
    draw = random.Random(3)
    template = llada_like()
    refused = 0
    for _ in range(60):
        dims, budget = request(draw)
        plan = search(template, dims, SMALL, budget)
        best = brute_force(template, dims, SMALL, budget)
        assert_keeps(plan, budget)
        assert plan.fits == (best is not None)
        refused += not plan.fits
    assert 10 <= refused <= 50


def test_the_longest_context_is_that_of_every_combination_with_exact_layouts():
    template = llada_like()
    ladders = {**SMALL, "kv": (1, 2), "heads": (1, 4), "logits": (1, 8)}
    budget = 3 * 2**30
    lengths = range(1024, 2**18, 1024)

    def dims(rows: int) -> dict[str, int]:
        return {"T": rows, "M": rows // 2}

    def fits_exactly(rows: int) -> bool:
        graphs = (
            template.instantiate({**dims(rows), **dict(zip(ladders, counts, strict=True))})
            for counts in itertools.product(*ladders.values())
        )
        return any(graph.lower_bound <= budget and exact(graph).peak <= budget for graph in graphs)

    searched = largest(lambda rows: search(template, dims(rows), ladders, budget).fits, lengths)
    assert searched == largest(lambda rows: bool(brute_force(template, dims(rows), ladders, budget)), lengths)
    assert searched == largest(fits_exactly, lengths)
    whole = largest(
        lambda rows: search(template, dims(rows), dict.fromkeys(WHOLE, (1,)), budget).fits, lengths
    )
    assert searched is not None
    assert whole is not None
    assert searched > 2 * whole


def check_requests(count: int, seed: int):
    draw = random.Random(seed)
    template = llada_like()
    coarse = {
        **dict.fromkeys(("ffn", "query", "kv"), (1, 4, 32, 512)),
        "heads": (1, 4, 32),
        "logits": (1, 8, 4096),
    }
    grid = np.meshgrid(*coarse.values())
    counts = {name: values.ravel() for name, values in zip(coarse, grid, strict=True)}
    outcomes = []
    for _ in range(count):
        dims, budget = request(draw)
        plan = search(template, dims, LADDERS, budget)
        assert_keeps(plan, budget)
        outcomes.append(plan.fits)
        if not plan.fits:
            assert (template.live_bytes({**dims, **counts}).max(axis=0) > budget).all()
            assert plan.stop_reason.startswith(f"{plan.peak_op}: ")
    assert 0.1 * count < sum(outcomes) < 0.9 * count


def test_a_request_is_planned_or_rightly_refused():
    check_requests(100, seed=4)


@pytest.mark.slow
def test_ten_thousand_requests_are_planned_or_rightly_refused():
    check_requests(10_000, seed=5)


def test_nothing_is_chunked_without_need():
    dims = {"T": 4096, "M": 4096}
    whole = llada_like().instantiate({**dims, **WHOLE}).lower_bound
    plan = search(llada_like(), dims, LADDERS, whole)
    assert plan.counts == WHOLE
    assert plan.peak_bytes == whole
    # The head owns this peak: one byte less and only its count rises.
    assert search(llada_like(), dims, LADDERS, whole - 1).counts == {**WHOLE, "logits": 2}


def one_op(size, owners: Sequence[str]) -> GraphTemplate:
    template = GraphTemplate("one")
    template.add_op("work", outputs={"x": size * 256}, owners=owners)
    return template


def test_the_cheapest_owner_that_suffices_alone_is_raised():
    size = ceil_div(100, dim("cheap")) + ceil_div(100, dim("dear"))
    ladders = {"cheap": range(1, 11), "dear": range(1, 101)}
    assert search(one_op(size, ("cheap", "dear")), {}, ladders, 150 * 256).counts == {"cheap": 2, "dear": 1}
    assert search(one_op(size, ("dear", "cheap")), {}, ladders, 150 * 256).counts == {"cheap": 1, "dear": 2}


def test_the_costliest_owner_is_raised_until_a_cheaper_one_suffices():
    size = ceil_div(100, dim("cheap")) + ceil_div(1000, dim("dear"))
    ladders = {"cheap": range(1, 11), "dear": range(1, 1001)}
    # 60 needs both. With "dear" at 20 the other could reach 50 + 10 and does, at the end of its ladder.
    assert search(one_op(size, ("cheap", "dear")), {}, ladders, 60 * 256).counts == {"cheap": 10, "dear": 20}


def test_a_step_that_costs_memory_at_first_is_taken():
    # Whole: 100. In groups: a buffer of 60 and 100 / groups.
    size = ceil_div(100, dim("heads")) + 60 * minimum(dim("heads") + -1, 1)
    assert size.evaluate({"heads": 2}) > size.evaluate({"heads": 1})
    assert search(one_op(size, ("heads",)), {}, {"heads": (1, 2, 3, 4)}, 90 * 256).counts == {"heads": 4}


def test_a_peak_that_nothing_lowers_is_named():
    template = GraphTemplate("fixed")
    template.add_input("x", 4096, keep=True)
    template.add_op("work", scratch=ceil_div(65536, dim("ffn")), owners=("ffn", "query"))
    template.add_op("copy", outputs={"y": 8192})
    plan = search(template, {}, {"ffn": range(1, 100)}, 12287)
    assert plan.stop_reason == "copy: no chunk count lowers its 12288 bytes any further"
    assert not plan.fits
    assert plan.counts == {"ffn": 9}
    # At 12288 it is enough that the first operator is no longer above it.
    plan = search(template, {}, {"ffn": range(1, 100)}, 12288)
    assert plan.fits
    assert plan.counts == {"ffn": 8}


def test_chunks_make_up_for_what_no_layout_can_use():
    template = block_template(WASTEFUL, 256 * ceil_div(10_000, dim("cut")))
    # 8 units of 256 * 100 are alive at most, but 9 are needed.
    plan = search(template, {}, {"cut": range(100, 200)}, 256 * 899)
    assert plan.fits
    assert (plan.counts, plan.lower_bound, plan.peak_bytes) == ({"cut": 102}, 256 * 8 * 99, 256 * 9 * 99)
    plan = search(template, {}, {"cut": (100,)}, 256 * 899)
    assert not plan.fits
    assert (plan.lower_bound, plan.peak_bytes) == (256 * 800, 256 * 900)


def test_every_combination_means_the_fewest_steps():
    size = ceil_div(100, dim("a")) + ceil_div(100, dim("b"))
    template = one_op(size, ("a", "b"))
    ladders = {"a": (1, 2, 3, 4), "b": (1, 50)}
    # One step of "b" suffices; "a" alone ends at 125.
    plan = brute_force(template, {}, ladders, 103 * 256)
    assert plan is not None
    assert plan.fits
    assert plan.counts == {"a": 1, "b": 50}
    assert brute_force(template, {}, ladders, 26 * 256) is None


@pytest.mark.parametrize("ladder", [(), (1, 1), (2, 1)])
def test_a_ladder_must_rise(ladder: tuple[int, ...]):
    with pytest.raises(ValueError, match="ladder of 'ffn' is not a rising list of counts"):
        search(one_op(dim("ffn"), ("ffn",)), {}, {"ffn": ladder}, 1)


@given(st.lists(st.integers(0, 1000), unique=True).map(sorted), st.integers(-1, 1001))
def test_the_largest_value_that_fits(values: list[int], limit: int):
    below = [value for value in values if value <= limit]
    assert largest(lambda value: value <= limit, values) == (max(below) if below else None)


def test_a_length_is_found_in_few_trials():
    tried = []
    largest(lambda value: tried.append(value) or value <= 777, range(2**20))
    assert len(tried) <= 21


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, int]]:
    """The dimensions of every call of `GraphTemplate.live_bytes` from here on."""
    calls: list[Mapping[str, int]] = []
    original = GraphTemplate.live_bytes

    def counted(template: GraphTemplate, dims: Mapping[str, int]) -> np.ndarray:
        calls.append(dims)
        return original(template, dims)

    monkeypatch.setattr(GraphTemplate, "live_bytes", counted)
    return calls


def test_many_steps_take_few_evaluations(evaluations: list[Mapping[str, int]]):
    plan = search(one_op(ceil_div(100_000, dim("logits")), ("logits",)), {}, LADDERS, 33 * 256)
    assert plan.counts["logits"] == 3031
    assert len(evaluations) < 50


def test_steps_of_several_components_take_one_evaluation_each(evaluations: list[Mapping[str, int]]):
    """Where peaks take turns, so that nothing is gained by looking ahead."""
    plan = search(llada_like(), {"T": 32768, "M": 16000}, LADDERS, THREE_RESIDUALS)
    assert plan.fits
    steps = sum(ladder.index(plan.counts[name]) for name, ladder in LADDERS.items())
    assert steps > 150
    assert len(evaluations) < 1.1 * steps


@pytest.mark.slow
def test_planning_is_quick():
    """A plan in some 5 ms, a template's numbers in some 40 us.

    That is for a machine that sums a hundred thousand numbers in 3 ms. What else runs on a machine slows
    these by different factors, so that the limits can only tell what takes several times as long.
    """

    def best(function: Callable[[], object]) -> float:
        return min(timeit.repeat(function, number=1, repeat=30))

    allowed = 3 * max(1, best(lambda: sum(number for number in range(100_000))) / 3e-3)
    template = llada_like()
    dims = {"T": 32768, "M": 16000}
    assert best(lambda: template.instantiate({**dims, **WHOLE}).live_bytes) < allowed * 40e-6
    assert best(lambda: search(template, dims, LADDERS, THREE_RESIDUALS)) < allowed * 5e-3
