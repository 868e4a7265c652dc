"""Tango's interval of paired proportions: published values, what defines it, and its coverage."""

import functools
import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jdllm.demo.paired import Discordance, discordance

Z95 = statistics.NormalDist().inv_cdf(0.975)


@st.composite
def counts(draw: st.DrawFn) -> Discordance:
    pairs = draw(st.integers(1, 3000))
    first = draw(st.integers(0, pairs))
    return Discordance(first, draw(st.integers(0, pairs - first)), pairs)


@pytest.mark.parametrize(
    ("case", "level", "low", "high"),
    [
        # Airway responsiveness before and after transplantation: Fagerland, Lydersen and Laake (2014).
        (Discordance(1, 7, 21), 0.95, -0.517, -0.026),
        # As the R package PropCIs gives them.
        (Discordance(28, 25, 618), 0.90, -0.0148, 0.0247),
        (Discordance(50, 31, 549), 0.90, 0.0078, 0.0621),
    ],
)
def test_published_values(case: Discordance, level: float, low: float, high: float):
    assert case.interval(level) == pytest.approx((low, high), abs=5e-4 if case.pairs == 21 else 5e-5)


@given(st.integers(1, 10_000))
def test_without_discordant_pairs_the_interval_has_a_width(pairs: int):
    limit = Z95**2 / (pairs + Z95**2)  # where the variance is n d (1 - d), by hand
    assert Discordance(0, 0, pairs).interval() == pytest.approx((-limit, limit), rel=1e-9)


@given(counts())
def test_exchanging_the_methods_mirrors_the_interval(case: Discordance):
    low, high = case.interval()
    mirrored = Discordance(case.second, case.first, case.pairs)
    assert mirrored.interval() == pytest.approx((-high, -low), abs=1e-9)
    names = {"better": "worse", "worse": "better", "no difference shown": "no difference shown"}
    assert mirrored.verdict() == names[case.verdict()]


@given(counts())
def test_the_interval_encloses_the_difference_and_grows_with_the_level(case: Discordance):
    low, high = case.interval()
    assert -1 <= low <= case.difference <= high <= 1
    wider = case.interval(0.99)
    assert wider.low <= low <= high <= wider.high
    assert low < high


@given(counts())
def test_the_verdict_is_that_of_mcnemars_test(case: Discordance):
    discordant = case.first + case.second
    statistic = (case.first - case.second) / math.sqrt(discordant) if discordant else 0.0
    assume(abs(abs(statistic) - Z95) > 1e-6)
    rejected = "better" if statistic > 0 else "worse"
    assert case.verdict() == (rejected if abs(statistic) > Z95 else "no difference shown")


@given(counts(), st.floats(-0.99, 0.99))
def test_the_score_takes_its_variance_from_the_likeliest_probabilities(case: Discordance, difference: float):
    """Against a search over the probability that only the second method is right."""
    assume(abs(difference) > 1e-3)
    low, high = max(0.0, -difference), (1 - difference) / 2
    grid = np.linspace(low, high, 20_001)[1:-1]
    same = case.pairs - case.first - case.second
    likelihood = (
        case.first * np.log(grid + difference)
        + case.second * np.log(grid)
        + same * np.log1p(-2 * grid - difference)
    )
    only_second = grid[likelihood.argmax()]
    variance = case.pairs * (2 * only_second + difference - difference**2)
    expected = (case.first - case.second - case.pairs * difference) / math.sqrt(variance)
    # Steps of the search where the likelihood is greatest, in terms of the score.
    step = (high - low) / 20_000
    assert case.score(difference) == pytest.approx(
        expected, rel=2 * case.pairs * step / variance + 1e-6, abs=1e-9
    )


def test_outcomes_are_counted_in_pairs():
    first = [True, True, True, False, False, True]
    second = [True, False, False, True, False, False]
    assert discordance(first, second) == Discordance(3, 1, 6)


@pytest.mark.parametrize(("first", "second"), [([True], [True, False]), ([], [])])
def test_what_is_no_pairs_is_refused(first: list[bool], second: list[bool]):
    with pytest.raises(ValueError, match="pairs"):
        discordance(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pairs", "only_first", "only_second"),
    [(2000, 0.02, 0.02), (2000, 0.05, 0.03), (200, 0.05, 0.05), (200, 0.2, 0.05), (2000, 0.002, 0.001)],
)
def test_coverage(pairs: int, only_first: float, only_second: float):
    draws = np.random.default_rng(0).multinomial(
        pairs, [only_first, only_second, 1 - only_first - only_second], size=20_000
    )

    @functools.cache
    def covers(first: int, second: int) -> bool:
        low, high = Discordance(first, second, pairs).interval()
        return low <= only_first - only_second <= high

    coverage = np.mean([covers(int(first), int(second)) for first, second, _ in draws])
    assert 0.94 < coverage < 0.965
