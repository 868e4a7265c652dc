"""Dream's original rule: every masked row commits by its own draw."""

from jaxtyping import Array, Bool

from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: Ranked, params: RuleParams, segments: int) -> Bool[Array, " rows"]:
    """Rows whose draw is below `fraction`; in some steps that is none (HKUNLP/Dream, alg 'origin')."""
    return ranked.draw < params.fraction
