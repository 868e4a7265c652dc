"""What a transfer rule sees: the candidates of every segment, ranked."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jdllm.arrays import Tensor

PerRow = Float[Array, " rows"]


class RuleParams(NamedTuple):
    """Parameters of the rules for this step, one entry per segment; a rule reads its own.

    - `quota`: tokens to commit; where confidences alone decide, the masks of the block when it was entered.
    - `fraction`: share of the masked rows to commit, in [0, 1].
    - `options`: the options of all rules that the device reads, by name; see `jdllm.decoding.option.Option`.
    """

    quota: Int[Tensor, " segments"]
    fraction: Float[Tensor, " segments"]
    options: Mapping[str, Shaped[Tensor, " segments"]]


class Candidates(NamedTuple):
    """The evaluated rows, in any order.

    - `masked`: rows that may commit.
    - `segment`: the segment of each row; any value where it is not masked.
    - `confidence`: by the segment's measure.
    - `order`: what ranks the rows: the confidence, unless the order itself is drawn.
    - `draw`: a uniform draw in (0, 1).
    """

    masked: Bool[Array, " rows"]
    segment: Int[Tensor, " rows"]
    confidence: PerRow
    order: PerRow
    draw: PerRow


class Ranked(NamedTuple):
    """Candidates by segment and falling order; rows that are no candidates come last.

    - `row`: where each came from.
    - `segment`: the number of segments for rows that are no candidates.
    - `rank`: place within the segment, from 0; equal orders go to the lowest row.
    - `count`: candidates of the row's segment.
    - `confidence`: by the segment's measure.
    - `draw`: a uniform draw in (0, 1).
    """

    row: Int[Array, " rows"]
    segment: Int[Array, " rows"]
    rank: Int[Array, " rows"]
    count: Int[Array, " rows"]
    confidence: PerRow
    draw: PerRow

    def first_rank(self, where: Bool[Array, " rows"], segments: int) -> Int[Array, " rows"]:
        """For each row the lowest rank of its segment at which `where` holds; `count` if there is none."""
        lowest = jnp.full(segments + 1, self.rank.shape[0])
        lowest = lowest.at[self.segment].min(jnp.where(where, self.rank, self.rank.shape[0]))
        return jnp.minimum(lowest[self.segment], self.count)


State = Mapping[str, Shaped[Array, " entries"]]
"""The arrays of one rule by name: an entry for each segment, or for each row in the order of `Ranked`."""

Accept = Callable[[Ranked, RuleParams, int], Bool[Array, " rows"]]
"""(ranked rows, parameters of each row's segment, segments) -> the rows that commit. What is said of rows of
other rules does not count."""

AcceptWithState = Callable[[Ranked, RuleParams, int, State], tuple[Bool[Array, " rows"], State]]
"""The same for a rule that carries state: it takes the state before the step, and returns the next state."""


def rank_candidates(candidates: Candidates, segments: int) -> Ranked:
    """Sort the rows by (segment, falling order, row)."""
    rows = candidates.order.shape[0]
    group = jnp.where(candidates.masked, candidates.segment, segments)
    group, _, row = lax.sort((group, -candidates.order, jnp.arange(rows)), num_keys=3)
    # One fused comparison; a binary search is a device loop.
    first = jnp.searchsorted(group, jnp.arange(segments + 2), method="compare_all")
    return Ranked(
        row=row,
        segment=group,
        rank=jnp.arange(rows) - first[group],
        count=(first[1:] - first[:-1])[group],
        confidence=candidates.confidence[row],
        draw=candidates.draw[row],
    )
