"""The transfer rules against plain Python, alone and mixed.

Confidences, draws and parameters lie on grids on which f32 arithmetic decides every comparison as exact
arithmetic does; ties and values that equal their bound are frequent.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.decoding.registry import numbered
from jdllm.decoding.transfer.of_rules import OfRules
from jdllm.decoding.transfer.ranking import Candidates, RuleParams
from jdllm.decoding.transfer.select import select
from tests.decoding.slow_rules import Asked, Rule, committed

ROWS, SEGMENTS = 24, 4
OPTIONS = ("threshold", "threshold_strict", "factor", "factor_end", "entropy_bound", "threshold_fall")
NOT_DREAM = [rule for rule in Rule if rule is not Rule.ORIGIN]
jitted = jax.jit(select, static_argnames="long_rules")

asked = st.builds(
    Asked,
    quota=st.integers(0, ROWS + 2),
    fraction=st.integers(0, 16).map(lambda n: n / 16),
    threshold=st.integers(0, 16).map(lambda n: n / 16),
    strict=st.booleans(),
    factor=st.integers(0, 40).map(lambda n: n / 8),
    open_end=st.booleans(),
    entropy_bound=st.integers(0, 40).map(lambda n: n / 16),
    fall=st.integers(0, 16).map(lambda n: n / 16),
    # Beyond the rows of a case, and a power of two: shares of it are exact in f32.
    masks=st.sampled_from([0, 32, 64]),
)
# What is certain is frequent, so that the factor rule passes more than a row or two.
share = st.integers(0, 16).map(lambda n: n / 16) | st.integers(900, 1024).map(lambda n: n / 1024)


class Case:
    """A ragged batch: rows in any order of segments, some of them not masked."""

    def __init__(self, rules: list[Rule], params: list[Asked], rows: list[tuple]):
        self.rules, self.params = rules, params
        self.segment = [segment for segment, *_ in rows]
        self.masked = [masked for _, masked, *_ in rows]
        # The entropy bound reads confidences as negative entropies.
        self.confidence = [
            -16 * (1 - value) if rules[segment] is Rule.ENTROPY_BOUND else value
            for segment, _, value, *_ in rows
        ]
        self.draw = [draw for *_, draw, _ in rows]
        self.order = [
            value if drawn is None else drawn
            for value, (*_, drawn) in zip(self.confidence, rows, strict=True)
        ]

    def rows_of(self, segment: int) -> list[int]:
        return [row for row in range(ROWS) if self.masked[row] and self.segment[row] == segment]

    def expected(self) -> np.ndarray:
        commit = np.zeros(ROWS, bool)
        for segment, (rule, params) in enumerate(zip(self.rules, self.params, strict=True)):
            rows = self.rows_of(segment)
            confidence, order, draw = (
                [column[row] for row in rows] for column in (self.confidence, self.order, self.draw)
            )
            commit[[rows[i] for i in committed(rule, confidence, order, draw, params)]] = True
        return commit

    def actual(self, masked: list[bool] | None = None, long_rules: bool = True) -> np.ndarray:
        return run(
            self.rules,
            self.params,
            self.confidence,
            self.masked if masked is None else masked,
            self.segment,
            self.order,
            self.draw,
            long_rules,
        )


def run(
    rules: list[Rule],
    params: list[Asked],
    confidence: Any,
    masked: Any = None,
    segment: Any = None,
    order: Any = None,
    draw: Any = None,
    long_rules: bool = True,
) -> np.ndarray:
    """`select` with everything masked, in one segment and ordered by confidence unless given."""
    count = len(confidence)
    candidates = Candidates(
        masked=jnp.asarray(np.ones(count) if masked is None else masked, bool),
        segment=jnp.asarray(np.zeros(count) if segment is None else segment, jnp.int32),
        confidence=jnp.asarray(confidence, jnp.float32),
        order=jnp.asarray(confidence if order is None else order, jnp.float32),
        draw=jnp.asarray(np.zeros(count) if draw is None else draw, jnp.float32),
    )
    f32 = np.float32
    dtypes = (np.int32, f32, f32, np.bool_, f32, np.bool_, f32, f32, np.int32)
    columns = (np.array(c, d) for c, d in zip(zip(*params, strict=True), dtypes, strict=True))
    quota, fraction, *own, masks = columns
    options = OfRules(dict(zip(OPTIONS, own, strict=True)), numbered())
    numbers = {acceptance.name: number for number, acceptance in numbered()}
    rule = np.array([numbers[rule.value] for rule in rules], np.int32)
    falling = [one is Rule.FALLING_THRESHOLD for one in rules]
    quota = np.where(falling, masks, quota)  # where confidences alone decide, a step may commit the block
    commit, states = jitted(candidates, rule, RuleParams(quota, fraction, options), {}, long_rules=long_rules)
    assert not states
    return np.asarray(commit)


def cases(rules: st.SearchStrategy[Rule]) -> st.SearchStrategy[Case]:
    segments = st.integers(0, SEGMENTS - 1)
    order = st.none() | st.integers(0, 30).map(lambda n: n / 8)
    row = st.tuples(segments, st.booleans() | st.just(True), share, share, order)
    return st.builds(
        Case,
        st.lists(rules, min_size=SEGMENTS, max_size=SEGMENTS),
        st.lists(asked, min_size=SEGMENTS, max_size=SEGMENTS),
        st.lists(row, min_size=ROWS, max_size=ROWS),
    )


@pytest.mark.parametrize("rule", Rule)
def test_each_rule(rule: Rule):
    @given(cases(st.just(rule)))
    def check(case: Case):
        np.testing.assert_array_equal(case.actual(), case.expected())

    check()


@pytest.mark.slow
@given(cases(st.sampled_from(list(Rule))))
def test_any_mix(case: Case):
    np.testing.assert_array_equal(case.actual(), case.expected())


@given(cases(st.sampled_from(list(Rule))))
def test_a_mix_gives_what_each_segment_gives_alone(case: Case):
    together = case.actual()
    for segment in range(SEGMENTS):
        own = set(case.rows_of(segment))
        alone = case.actual(masked=[row in own for row in range(ROWS)])
        assert set(np.flatnonzero(alone)) == own & set(np.flatnonzero(together))


@pytest.mark.slow
@given(cases(st.sampled_from([rule for rule in Rule if rule is not Rule.ENTROPY_BOUND])))
def test_without_long_rules_other_rules_are_the_same(case: Case):
    np.testing.assert_array_equal(case.actual(long_rules=False), case.expected())


@pytest.mark.slow
@given(cases(st.sampled_from(NOT_DREAM)))
def test_every_segment_commits_something_except_by_chance(case: Case):
    case.params = [params._replace(quota=max(params.quota, 1)) for params in case.params]
    commit = case.actual()
    for segment in range(SEGMENTS):
        rows = case.rows_of(segment)
        assert not rows or commit[rows].any()


@pytest.mark.parametrize("rule", [Rule.QUOTA, Rule.DEFERRED])
def test_ties_go_to_the_lowest_row(rule: Rule):
    confidence, segment = [0.5] * ROWS, [row % 2 for row in range(ROWS)]
    commit = run([rule] * 2, [Asked(3, threshold=0.5), Asked(1, threshold=0.5)], confidence, segment=segment)
    assert np.flatnonzero(commit).tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("rule", [Rule.THRESHOLD, Rule.FACTOR, Rule.ENTROPY_BOUND])
def test_where_one_row_commits_a_tie_goes_to_the_lowest(rule: Rule):
    params = Asked(threshold=0.5, factor=0.0, entropy_bound=0.0)
    assert np.flatnonzero(run([rule], [params], [-3.0, -2.0, -2.0, -4.0])).tolist() == [1]


def test_a_quota_beyond_the_candidates_takes_them_all_and_no_others():
    masked = np.arange(ROWS) < 5
    commit = run([Rule.QUOTA] * 4, [Asked(9)] * 4, np.zeros(ROWS), masked, np.full(ROWS, 2))
    np.testing.assert_array_equal(commit, masked)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("padding", [SEGMENTS, 1, 0, 99])
def test_rows_that_are_not_masked_may_name_any_segment(rule: Rule, padding: int):
    masked = np.arange(ROWS) < 6
    segment = np.where(masked, 1, padding)
    params = [Asked(2, fraction=1.0)] * SEGMENTS
    commit = run([rule] * SEGMENTS, params, np.linspace(0.1, 0.9, ROWS), masked, segment)
    assert commit.any()
    assert not commit[~masked].any()


class TestThreshold:
    confidence = (0.25, 0.75, 0.5, 0.75, 1.0)

    @pytest.mark.parametrize(("strict", "expected"), [(False, [1, 3, 4]), (True, [4])])
    def test_an_equal_confidence(self, strict: bool, expected: list[int]):
        params = [Asked(threshold=0.75, strict=strict)]
        assert np.flatnonzero(run([Rule.THRESHOLD], params, self.confidence)).tolist() == expected

    def test_certainty_does_not_exceed_one(self):
        confidence = [1.0, 1.0, 0.5]
        for strict, expected in ((False, [0, 1]), (True, [0])):
            commit = run([Rule.THRESHOLD], [Asked(threshold=1.0, strict=strict)], confidence)
            assert np.flatnonzero(commit).tolist() == expected


class TestFallingThreshold:
    def test_it_falls_with_the_masks_of_the_block(self):
        """A block of eight rows; each is as sure in every step."""
        confidence = np.array([0.75, 0.5, 0.625, 0.5625, 0.25, 0.8125, 0.125, 0.375])
        left, took = np.ones(8, bool), []
        while left.any():
            threshold = 0.75 * (1 - 1.0 * (1 - left.sum() / 8))
            commit = left & (confidence >= threshold)
            if not commit.any():
                commit = left & (confidence == confidence[left].max())
            asked = Asked(threshold=0.75, fall=1.0, masks=8)
            actual = run([Rule.FALLING_THRESHOLD], [asked], confidence, left)
            np.testing.assert_array_equal(actual, commit)
            left, took = left & ~commit, [*took, np.flatnonzero(commit).tolist()]
        assert took == [[0, 5], [2, 3], [1, 7], [4], [6]]

    @given(st.data())
    def test_without_a_fall_it_is_the_threshold(self, data: st.DataObject):
        confidence = data.draw(st.lists(st.floats(0, 1, width=32), min_size=ROWS, max_size=ROWS))
        masked = data.draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
        threshold, masks = data.draw(st.floats(0, 1, width=32)), data.draw(st.integers(0, 2 * ROWS))
        params = [Asked(threshold=threshold, fall=0.0, masks=masks, strict=data.draw(st.booleans()))]
        falling, plain = (
            run([rule], params, confidence, masked) for rule in (Rule.FALLING_THRESHOLD, Rule.THRESHOLD)
        )
        np.testing.assert_array_equal(falling, plain)

    def test_the_surest_row_commits_below_any_threshold(self):
        params = [Asked(threshold=1.0, fall=0.0, masks=4)]
        assert np.flatnonzero(run([Rule.FALLING_THRESHOLD], params, [0.25, 0.5, 0.125])).tolist() == [1]


class TestFactor:
    """With factor 1 the row of rank k needs 1 - 1 / (k + 2): any, 2/3, 3/4, 4/5, ..."""

    @pytest.mark.parametrize(
        ("confidence", "official", "fixed"),
        [
            ([0.1], 1, 1),
            ([0.9, 0.1], 2, 1),
            ([0.9, 0.7], 2, 2),
            ([0.9, 0.1, 0.1], 1, 1),
            ([0.9, 0.75, 0.75], 3, 3),
            ([0.9, 0.75, 0.7], 3, 2),
            ([0.9, 0.8, 0.8, 0.5, 0.4], 3, 3),
            ([0.9, 0.8, 0.8, 0.8, 0.4], 5, 4),
            ([0.9, 0.8, 0.1, 0.1, 0.99], 3, 3),  # in falling order: 0.99, 0.9, 0.8, 0.1, 0.1
        ],
    )
    def test_both_ends(self, confidence: list[float], official: int, fixed: int):
        for open_end, expected in ((True, official), (False, fixed)):
            assert run([Rule.FACTOR], [Asked(open_end=open_end)], confidence).sum() == expected

    def test_the_end_is_that_of_the_segment(self):
        confidence, segment = [0.9, 0.1, 0.9, 0.1, 0.1], [0, 0, 1, 1, 1]
        commit = run([Rule.FACTOR] * 2, [Asked()] * 2, confidence, segment=segment)
        assert np.flatnonzero(commit).tolist() == [0, 1, 2]


class TestEntropyBound:
    @pytest.mark.parametrize(
        ("bound", "count"), [(0.0, 1), (0.24, 1), (0.25, 2), (0.74, 2), (0.75, 3), (9, 4)]
    )
    def test_entropies_before_sum_to_at_most_the_bound(self, bound: float, count: int):
        confidence = [-2.0, -0.25, -1.0, -0.5]
        commit = run([Rule.ENTROPY_BOUND], [Asked(entropy_bound=bound)], confidence)
        assert np.flatnonzero(commit).tolist() == sorted([1, 3, 2, 0][:count])

    def test_rows_without_entropy_commit_together_and_the_first_other_with_them(self):
        commit = run([Rule.ENTROPY_BOUND], [Asked(entropy_bound=0.0)], [0.0, -1.5, 0.0, -1.0, 0.0])
        assert np.flatnonzero(commit).tolist() == [0, 2, 3, 4]

    def test_sums_do_not_depend_on_where_the_segment_lies(self):
        rng = np.random.default_rng(0)
        own = -rng.exponential(0.3, 12).astype(np.float32)
        before = np.cumsum(np.sort(-own), dtype=np.float32)
        for bound in before[:-1]:
            for others in (0, 11):
                confidence = np.concatenate([-rng.exponential(3.0, others), own])
                segment = np.repeat([0, 1], [others, 12])
                params = [Asked(entropy_bound=float(bound))] * 2
                commit = run([Rule.ENTROPY_BOUND] * 2, params, confidence, segment=segment)
                assert commit[others:].sum() == 1 + (before[:-1] <= bound).sum()


class TestOrigin:
    def test_draws_decide_whatever_the_confidence(self):
        draw = [0.1, 0.5, 0.25, 0.9]
        commit = run([Rule.ORIGIN], [Asked(fraction=0.5)], [0.0, 1.0, 0.2, 0.9], draw=draw)
        assert np.flatnonzero(commit).tolist() == [0, 2]

    @pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (1.0, 4)])
    def test_none_and_all(self, fraction: float, count: int):
        draw = [2.0**-33, 0.5, 0.25, 1 - 2.0**-24]
        assert run([Rule.ORIGIN], [Asked(fraction=fraction)], [0.5] * 4, draw=draw).sum() == count


class TestDeferred:
    @pytest.mark.parametrize(
        ("quota", "threshold", "expected"),
        [
            (1, 0.0, [2]),
            (3, 0.0, [0, 2, 3]),
            (3, 0.5, [0, 2]),
            (3, 0.95, [2]),
            (9, 0.3, [0, 2, 3]),
            (0, 0.0, []),
        ],
    )
    def test_unsure_rows_of_the_quota_are_put_off(self, quota: int, threshold: float, expected: list[int]):
        commit = run([Rule.DEFERRED], [Asked(quota, threshold=threshold)], [0.5, 0.25, 0.75, 0.375])
        assert np.flatnonzero(commit).tolist() == expected
