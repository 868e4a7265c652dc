"""The difference of two methods that were tried on the same instances, each right or wrong."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

Verdict = Literal["better", "worse", "no difference shown"]


class Interval(NamedTuple):
    """Limits of a confidence interval."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Discordance:
    """What a paired comparison rests on (the counts of McNemar's test).

    - `first`, `second`: instances that only the first, or only the second method got right.
    - `pairs`: all instances.
    """

    first: int
    second: int
    pairs: int

    def __post_init__(self):
        if min(self.first, self.second) < 0 or not 0 < self.pairs >= self.first + self.second:
            raise ValueError(f"{self} counts more discordant pairs than pairs, or fewer than none")

    @property
    def difference(self) -> float:
        """Share of right answers of the first method minus that of the second."""
        return (self.first - self.second) / self.pairs

    def interval(self, level: float = 0.95) -> Interval:
        """Tango's score interval of `difference`.

        It holds the differences that a score test at 1 - `level` does not reject; 0 is outside exactly where
        McNemar's test without continuity correction rejects. It keeps its level where few pairs are
        discordant, and has a width where none is, which a bootstrap has not.

        Arguments:
        - `level`: confidence, between 0 and 1.

        Returns limits from -1 to 1 that enclose `difference`.

        Source: T. Tango, Equivalence test and confidence interval for the difference in proportions for the
        paired-sample design, Statistics in Medicine 17 (1998), 891-908.
        """
        z = statistics.NormalDist().inv_cdf((1 + level) / 2)
        return Interval(self._limit(z, -1.0), self._limit(z, 1.0))

    def verdict(self, level: float = 0.95) -> Verdict:
        """What `interval` says of the first method against the second."""
        low, high = self.interval(level)
        return "better" if low > 0 else "worse" if high < 0 else "no difference shown"

    def score(self, difference: float) -> float:
        """Tango's statistic for a true difference strictly between -1 and 1, falling in it; z under the null.

        Its variance is that of the likeliest probabilities with that difference.
        """
        n, b, c = self.pairs, self.first, self.second
        linear = (2 * n - b + c) * difference - b - c
        constant = -c * difference * (1 - difference)
        likeliest = (math.sqrt(max(linear**2 - 8 * n * constant, 0.0)) - linear) / (4 * n)
        variance = n * (2 * likeliest + difference * (1 - difference))
        excess = b - c - n * difference
        return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)

    def _limit(self, z: float, end: float) -> float:
        """The difference nearest to `end` whose score is at most `z` from 0."""
        inside, outside = self.difference, end
        while True:
            middle = (inside + outside) / 2
            if middle in (inside, outside):
                return inside
            if abs(self.score(middle)) <= z:
                inside = middle
            else:
                outside = middle


def discordance(first: Sequence[bool], second: Sequence[bool]) -> Discordance:
    """Count where two methods' outcomes on the same instances, in the same order, differ.

    Raises `ValueError` where the two have not the same length, or none.
    """
    a, b = np.asarray(first, bool), np.asarray(second, bool)
    if a.shape != b.shape:
        raise ValueError(f"{len(a)} outcomes of the first method and {len(b)} of the second are no pairs")
    return Discordance(int((a & ~b).sum()), int((b & ~a).sum()), len(a))
