"""Selection of the rows that commit, against brute force."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jdllm.decoding.transfer import select_top

ROWS, SEGMENTS = 24, 4
select = jax.jit(select_top)


def run(confidence, candidate, segment, quota) -> np.ndarray:
    return np.asarray(
        select(
            np.asarray(confidence, np.float32),
            np.asarray(candidate, bool),
            np.asarray(segment, np.int32),
            np.asarray(quota, np.int32),
        )
    )


def brute_force(confidence, candidate, segment, quota) -> np.ndarray:
    commit = np.zeros(len(confidence), bool)
    for which, count in enumerate(quota):
        rows = [r for r in range(len(confidence)) if candidate[r] and segment[r] == which]
        for _ in range(min(count, len(rows))):
            best = max(rows, key=lambda r: (confidence[r], -r))
            commit[best] = True
            rows.remove(best)
    return commit


def columns(confidence: st.SearchStrategy[float]):
    return st.tuples(
        st.lists(confidence, min_size=ROWS, max_size=ROWS),
        st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
        st.lists(st.integers(0, SEGMENTS - 1), min_size=ROWS, max_size=ROWS),
        st.lists(st.integers(0, ROWS + 2), min_size=SEGMENTS, max_size=SEGMENTS),
    )


@given(columns(st.floats(-1, 1, width=32)))
def test_equals_brute_force(case):
    np.testing.assert_array_equal(run(*case), brute_force(*case))


@given(columns(st.sampled_from([-1.0, 0.0, 0.5, 1.0])))
def test_equals_brute_force_where_many_confidences_tie(case):
    np.testing.assert_array_equal(run(*case), brute_force(*case))


def test_ties_go_to_the_lowest_row():
    commit = run([0.5] * ROWS, [True] * ROWS, [row % 2 for row in range(ROWS)], [3, 1, 0, 0])
    assert np.flatnonzero(commit).tolist() == [0, 1, 2, 4]


def test_a_quota_beyond_the_candidates_takes_them_all_and_no_others():
    candidate = np.arange(ROWS) < 5
    segment = np.full(ROWS, 2)
    np.testing.assert_array_equal(run(np.zeros(ROWS), candidate, segment, [9, 9, 100, 9]), candidate)


def test_padding_may_name_a_segment_that_is_none():
    candidate = np.arange(ROWS) < 6
    segment = np.where(candidate, 1, SEGMENTS)
    commit = run(np.arange(ROWS), candidate, segment, [1, 2, 1, 1])
    assert np.flatnonzero(commit).tolist() == [4, 5]
