"""Tables and pictures of plans, against the graph that they came from."""

import sys
from pathlib import Path

import numpy as np
import pytest

from jdllm.byte_sizes import format_bytes
from jdllm.errors import JdllmError
from jdllm.planning.planner import ActivationPlan, first_fit, make_plan
from jdllm.planning.report import (
    Frame,
    PeakRow,
    figure_of,
    format_peak_table,
    live_by_count,
    peak_table,
    timeline,
)
from jdllm.planning.search import search
from tests.planning.test_graph import WHOLE, llada_like
from tests.planning.test_planner import blocks

Plans = tuple[ActivationPlan, ActivationPlan]

DIMS = {"T": 8192, "M": 4000}
BUDGET = 2**28
FRAME = Frame("a model on a card", 3 * BUDGET, "768M", {"weights": 2 * BUDGET - 2**20, "overhead": 2**20})


@pytest.fixture(scope="module")
def plans() -> Plans:
    """All counts 1, and the plan for `BUDGET`."""
    ladders = {**dict.fromkeys(WHOLE, range(1, 513)), "heads": (1, 4)}
    template = llada_like()
    return search(template, DIMS, dict.fromkeys(WHOLE, (1,)), BUDGET), search(template, DIMS, ladders, BUDGET)


def test_the_table_lists_what_is_alive_at_the_peak():
    graph = blocks([(4, 0, 1), (2, 1, 2), (10, 1, 1), (9, 2, 3), (0, 1, 1)])
    plan = make_plan(graph, {}, "fits", first_fit(graph))
    assert peak_table(plan) == [
        PeakRow("t2", 2560, 10 / 16),
        PeakRow("t0", 1024, 4 / 16),
        PeakRow("t1", 512, 2 / 16),
    ]
    assert format_peak_table(plan).splitlines() == [
        "op1: 4.00 KiB alive",
        "t2    2.50 KiB   62.5%",
        "t0    1.00 KiB   25.0%",
        "t1       512 B   12.5%",
    ]


def test_nothing_alive_is_an_empty_table():
    graph = blocks([(0, 0, 0)])
    plan = make_plan(graph, {}, "fits", first_fit(graph))
    assert peak_table(plan) == []
    assert format_peak_table(plan) == "op0: 0 B alive"


def test_live_bytes_are_told_apart_by_the_counts_that_cut_them(plans: Plans):
    graph = llada_like().instantiate({**DIMS, **plans[1].counts})
    live = live_by_count(plans[1])
    assert set(live) == {"not chunked", "ffn", "query", "query, heads", "kv", "logits"}
    assert next(iter(live)) == "not chunked"
    assert np.sum(list(live.values()), axis=0).tolist() == graph.live_bytes.tolist()
    gate = graph.ops.index("layer0.ffn.gate")
    rows = -(-DIMS["T"] // plans[1].counts["ffn"])
    assert live["ffn"][gate] == rows * (4096 + 12288) * 2
    assert live["logits"][gate] == live["kv"][gate] == 0


def test_the_picture_shows_both_plans_their_peaks_what_stays_and_the_budget(plans: Plans):
    pytest.importorskip("matplotlib")
    figure = figure_of(*plans, FRAME)
    assert figure.get_suptitle() == FRAME.title
    assert len(figure.axes) == 2
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.axes[0].get_ylim()[1] >= (2 * BUDGET + plans[0].lower_bound) / 2**30
    for axes, plan, name in zip(figure.axes, plans, ("nothing cut", "as planned"), strict=True):
        stacks = {str(area.get_label()): np.array(area.get_paths()[0].vertices) for area in axes.collections}
        assert list(stacks)[:2] == ["weights", "overhead"]
        assert stacks["weights"][:, 1].max() == pytest.approx(FRAME.resident["weights"] / 2**30)
        top = max(stack[:, 1].max() for stack in stacks.values())
        assert top == pytest.approx((2 * BUDGET + plan.lower_bound) / 2**30)
        assert [text.get_text() for text in axes.texts] == [
            f"{plan.peak_op}: {format_bytes(plan.lower_bound)} of activations"
        ]
        (line,) = axes.lines
        assert np.all(np.asarray(line.get_ydata()) == 3 * BUDGET / 2**30)
        assert line.get_label() == "budget 768M"
        title = axes.get_title(loc="left")
        assert title.startswith(name)
        assert format_bytes(2 * BUDGET + plan.peak_bytes) in title
        for component, count in plan.counts.items():
            assert f"{component} {count}" in title
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == list(plans[0].ops)


@pytest.mark.parametrize(("name", "magic"), [("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")])
def test_the_picture_is_written_whole(plans: Plans, tmp_path: Path, name: str, magic: bytes):
    pytest.importorskip("matplotlib")
    (tmp_path / name).write_text("old")
    timeline(*plans, tmp_path / name, FRAME)
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_picture_that_cannot_be_written_is_refused(plans: Plans, tmp_path: Path):
    pytest.importorskip("matplotlib")
    with pytest.raises(JdllmError, match=r"plan\.doc: expected a name that ends in one of .*png.*svg"):
        timeline(*plans, tmp_path / "plan.doc", FRAME)
    with pytest.raises(JdllmError, match="missing is not a directory"):
        timeline(*plans, tmp_path / "missing" / "plan.png", FRAME)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_message_says_how_to_install_it(
    plans: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(JdllmError, match=r"needs matplotlib: pip install 'jdllm\[plot\]'"):
        timeline(*plans, tmp_path / "plan.png", FRAME)
