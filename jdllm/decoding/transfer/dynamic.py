"""SDAR's dynamic rule: all that are sure enough, where these are as many as the schedule asks for."""

from typing import TYPE_CHECKING

from jdllm.decoding.transfer import threshold
from jdllm.decoding.transfer.quota import linear
from jdllm.decoding.transfer.rule import Acceptance, TransferRule

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

    from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: "Ranked", params: "RuleParams", segments: int) -> "Bool[Array, ' rows']":
    """Rows whose confidence exceeds the threshold, or the first `quota` ranks where fewer rows do.

    A quota above the number of masked rows commits all of them. Source: `low_confidence_dynamic` of
    JetAstra/SDAR, and `generate` of LLaDA2.0.
    """
    import jax.numpy as jnp  # what declares parameters is read without JAX

    above = ranked.confidence > params.options["threshold"]
    sure = jnp.zeros(segments + 1, jnp.int32).at[ranked.segment].add(above)[ranked.segment]
    return jnp.where(sure >= params.quota, above, ranked.rank < params.quota)


(_THRESHOLD, _) = threshold.OPTIONS

RULE = TransferRule(
    "transfer",
    "dynamic",
    "all that are surer than `threshold`, or the schedule's quota of the surest where these are fewer"
    " (SDAR, LLaDA2.0)",
    Acceptance("dynamic", accept),
    options=(_THRESHOLD,),
    table=linear,
    published=True,
)
