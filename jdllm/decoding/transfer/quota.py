"""The fixed schedule: the surest `quota` rows."""

from jaxtyping import Array, Bool

from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: Ranked, params: RuleParams, segments: int) -> Bool[Array, " rows"]:
    """Rows of the first `quota` ranks. LLaDA's schedule, Dream's timetable, and margin and random orders."""
    return ranked.rank < params.quota
