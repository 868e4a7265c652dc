"""Confidence threshold: every row that is sure enough, and the surest in any case."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def reaches(ranked: Ranked, params: RuleParams) -> Bool[Array, " rows"]:
    """Rows whose confidence reaches the threshold (exceeds it where strict), or that rank first."""
    above = jnp.where(
        params.strict, ranked.confidence > params.threshold, ranked.confidence >= params.threshold
    )
    return above | (ranked.rank == 0)


def accept(ranked: Ranked, params: RuleParams, segments: int) -> Bool[Array, " rows"]:
    """Fast-dLLM's parallel decoding (NVlabs/Fast-dLLM v1, `threshold`)."""
    return reaches(ranked, params)
