"""The ladder of compiled sizes: few, and everything fits one of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.planning.buckets import row_bucket
from jdllm.planning.ladder import (
    DEFAULT_ROWS,
    MAX_SEGMENTS,
    TILE_ROWS,
    Entry,
    Ladder,
    PatientSizes,
    Sizes,
    make_ladder,
    make_score_ladder,
)

MOST_EXECUTABLES = {8192: 93, 36864: 101, 1 << 17: 109}
BUDGETS = st.integers(1, 1 << 17)


def executables(ladder: Ladder) -> int:
    kinds = ladder.full, ladder.refresh, ladder.refresh_any, ladder.reuse, ladder.single, ladder.ranked
    return sum(map(len, kinds))


@given(BUDGETS)
def test_a_served_model_has_few_executables(budget: int):
    ladder = make_ladder(budget)
    assert executables(ladder) <= next(most for rows, most in MOST_EXECUTABLES.items() if budget <= rows)
    assert len({*ladder.full}) == len(ladder.full)


@given(BUDGETS, st.floats(0, 1), st.floats(0, 1), st.integers(1, MAX_SEGMENTS))
def test_whatever_fits_the_budget_has_an_entry(budget: int, rows: float, head: float, segments: int):
    ladder = make_ladder(budget)
    asked = max(1, round(budget * rows))
    refreshed = max(1, round(asked * head))
    asked = min(asked, ladder.full[-1].rows)
    masked = max(1, round(asked * head))
    segments = min(segments, asked)
    entry = Sizes(ladder.full).choose(asked, masked, segments)
    assert entry in ladder.full
    assert entry.holds(asked, masked, segments)
    assert not any(e.rows < entry.rows and e.holds(asked, masked, segments) for e in ladder.full)
    usual = min(refreshed, budget if budget <= 2048 else ladder.head_rows)
    asked = max(1, round(budget * rows))
    for entries in (ladder.refresh, ladder.refresh_any):
        assert Sizes(entries).choose(asked, usual, segments) in entries


@given(BUDGETS)
def test_the_largest_entries_hold_the_budget_and_hardly_more(budget: int):
    ladder = make_ladder(budget)
    assert budget <= ladder.refresh[-1].rows < budget + 128
    assert ladder.full[-1].rows == (ladder.refresh[-1].rows if budget <= 18432 else ladder.full[-1].rows)
    assert ladder.full[-1].rows >= min(budget, 8192)
    assert all(entry.rows % 128 == 0 for entry in (*ladder.full, *ladder.refresh))
    for entries in (ladder.reuse, ladder.single, ladder.ranked):
        assert entries[-1].rows >= min(budget, MAX_SEGMENTS * TILE_ROWS)
        assert all(b.rows <= 2 * a.rows for a, b in pairwise(entries))
    assert {entry[:-1] for entry in ladder.reuse} <= {entry[:-1] for entry in ladder.single}
    assert {entry.steps for entry in ladder.single} == {1}
    assert all(b.rows <= 1.5 * a.rows for a, b in pairwise(ladder.reuse) if a.rows >= 64)
    assert all(b.rows <= 1.25 * a.rows for a, b in pairwise(ladder.single) if 128 <= a.rows <= 1280)


@pytest.mark.parametrize("budget", [2048, 8192, 36352, 65536])
def test_steps_of_many_rows_have_bounded_padding(budget: int):
    rows = sorted({entry.rows for entry in make_ladder(budget).full})
    assert all(b <= 1.5 * a for a, b in pairwise(rows) if a >= 512)


@given(BUDGETS)
def test_entries_have_sizes_in_common(budget: int):
    """They have their kernels in common then; some sizes are of refreshes alone."""
    ladder = make_ladder(budget)
    refreshed = {(entry.rows, entry.head_rows) for entry in ladder.refresh}
    narrow = {(entry.rows, entry.head_rows) for entry in ladder.full if entry.head_rows < entry.rows}
    assert narrow <= refreshed
    few = [entry.head_rows for entry in ladder.refresh if entry.head_rows < entry.rows]
    assert all(rows & (rows - 1) == 0 for rows in few)


@pytest.mark.parametrize("budget", [2048, 8192, 36352, 65536])
def test_refreshes_of_many_rows_have_bounded_padding(budget: int):
    ladder = make_ladder(budget)
    rows = [entry.rows for entry in ladder.refresh_any]
    assert all(b <= 1.5 * a for a, b in pairwise(rows) if a >= 512)
    rows = [entry.rows for entry in ladder.refresh]
    assert all(b <= 1.5 * a for a, b in pairwise(rows) if a >= 512)
    assert all(b <= 1.25 * a for a, b in pairwise(rows) if a >= 512 and b <= 4096)
    assert all(b <= 1.125 * a for a, b in pairwise(rows) if a >= 1024 and b <= min(4096, 7 * budget // 8))


def test_sizes_to_choose_from_are_those_of_one_ladder():
    rows = [entry.rows for entry in make_ladder(DEFAULT_ROWS[-1]).refresh]
    assert rows[-len(DEFAULT_ROWS) :] == list(DEFAULT_ROWS)
    assert DEFAULT_ROWS[0] == 8192
    for most in DEFAULT_ROWS:
        assert executables(make_ladder(most)) <= 101


@given(BUDGETS, st.integers(1, 1 << 17))
def test_four_sizes_score_whatever_fits_the_budget(budget: int, asked: int):
    entries = [*make_score_ladder(budget)]
    assert len(entries) <= 4
    assert budget <= entries[-1].rows < budget + 128
    asked = min(asked, budget)
    smallest = next(entry for entry in entries if entry.holds(asked, asked, 1))
    assert smallest.rows <= max(4 * asked + 128, entries[0].rows)


def test_a_refresh_is_one_step():
    assert {entry.steps for entry in make_ladder(8192).refresh} == {1}


@given(st.integers(8193, 1 << 20), st.floats(0, 1))
def test_what_is_longer_has_sizes_of_its_own(rows: int, head: float):
    ladder = make_ladder(8192)
    masked = max(1, round(rows * head))
    for entries in (ladder.full, ladder.refresh):
        entry = Sizes(entries).choose(rows, masked, 1)
        assert entry.rows == row_bucket(rows)
        assert entry.holds(rows, masked, 1)
        assert entry.steps <= entries[0].steps


ENTRIES = [Entry(rows, rows, 8, 64) for rows in (128, 256, 512, 1024)]


@pytest.mark.parametrize(
    ("rows", "compiled", "chosen"),
    [
        (100, (), 128),
        (100, (512, 1024), 512),
        (100, (128, 512), 128),
        (100, (1024,), 1024),
        (300, (128,), 512),
    ],
)
def test_what_is_compiled_stands_in_for_what_is_not(rows: int, compiled: tuple[int, ...], chosen: int):
    sizes = Sizes(ENTRIES)
    sizes.compiled.update(entry for entry in ENTRIES if entry.rows in compiled)
    assert sizes.choose(rows, 10, 1).rows == chosen


def test_an_entry_is_missed_once_others_are_padded_for_the_want_of_it():
    sizes = Sizes(ENTRIES)
    sizes.compiled.add(ENTRIES[2])
    assert sizes.choose(100, 10, 1, steps=5) == ENTRIES[2]
    assert sizes.missing(100, 10, 1) is None
    assert sizes.choose(100, 10, 1) == ENTRIES[2]
    assert sizes.missing(100, 10, 1) == ENTRIES[0]
    assert sizes.missing(200, 10, 1) is None
    sizes.compiled.add(ENTRIES[0])
    assert (sizes.missing(100, 10, 1), sizes.choose(100, 10, 1)) == (None, ENTRIES[0])


def test_what_cannot_be_compiled_is_not_missed():
    sizes = Sizes(ENTRIES)
    sizes.compiled.add(ENTRIES[2])
    sizes.given_up.add(ENTRIES[0])
    assert sizes.choose(100, 10, 1, steps=100) == ENTRIES[2]
    assert sizes.missing(100, 10, 1) is None


def test_what_is_on_no_ladder_is_never_missed():
    sizes = Sizes(ENTRIES)
    for _ in range(9):
        assert sizes.choose(5000, 10, 1, steps=100).rows == 5120
        assert sizes.missing(5000, 10, 1) is None


def test_nobody_is_padded_for_ever():
    sizes = PatientSizes(ENTRIES)
    sizes.compiled.add(ENTRIES[2])
    turns = 2**18 // (512 - 128)
    assert all(sizes.choose(100, 10, 1) == ENTRIES[2] for _ in range(turns))
    assert sizes.choose(100, 10, 1) == ENTRIES[0]
    assert sizes.choose(200, 10, 1) == ENTRIES[2]
    sizes.compiled.add(ENTRIES[0])
    assert sizes.choose(100, 10, 1) == ENTRIES[0]


def test_short_tiles_are_as_many_as_have_the_rows_of_usual_ones():
    """Else requests with longer blocks than those of their model would take turns, out of step for good."""
    short, usual = make_ladder(8192, tile_rows=8), make_ladder(8192)
    assert [kind[-1].rows for kind in (short.reuse, short.single, short.ranked)] == [2048] * 3
    assert (short.tiles, usual.tiles) == (256, 64)
