"""Fast-dLLM's factor rule: a threshold that depends on how many rows commit together."""

from jaxtyping import Array, Bool

from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: Ranked, params: RuleParams, segments: int) -> Bool[Array, " rows"]:
    """Rows before the first one, in falling confidence, that fails its own threshold.

    The row of rank k passes with confidence at least 1 - factor / (k + 2); rank 0 always passes. With
    `open_end` a failure at the very last rank is overlooked, as the published loop does (quirk Q8).
    """
    passes = (ranked.confidence >= 1 - params.factor / (ranked.rank + 2)) | (ranked.rank == 0)
    last = ranked.rank == ranked.count - 1
    return ranked.rank < ranked.first_rank(~passes & ~(params.open_end & last), segments)
