"""Fast-dLLM's rule for Dream: a quota, from which unsure rows are put off."""

from jaxtyping import Array, Bool

from jdllm.decoding.transfer.ranking import Ranked, RuleParams
from jdllm.decoding.transfer.threshold import reaches


def accept(ranked: Ranked, params: RuleParams, segments: int) -> Bool[Array, " rows"]:
    """Of the first `quota` ranks those that reach the threshold, and the first in any case.

    What is put off returns in the next step's quota (NVlabs/Fast-dLLM v1, Dream, `confidence_threshold`).
    """
    return (ranked.rank < params.quota) & reaches(ranked, params)
