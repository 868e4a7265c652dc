"""Confidence threshold: every row that is sure enough, and the surest in any case."""

from typing import TYPE_CHECKING

from jdllm.decoding.kinds import Scale
from jdllm.decoding.option import Option
from jdllm.decoding.transfer.rule import Acceptance, TransferRule

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    from jdllm.arrays import Tensor
    from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def reaches(
    ranked: "Ranked", params: "RuleParams", share: "Float[Tensor, ' rows'] | float" = 1.0
) -> "Bool[Array, ' rows']":
    """Rows that reach a share of the threshold (exceed it where strict), or that rank first."""
    import jax.numpy as jnp  # what declares parameters is read without JAX

    threshold, strict = share * params.options["threshold"], params.options["threshold_strict"]
    above = jnp.where(strict, ranked.confidence > threshold, ranked.confidence >= threshold)
    return above | (ranked.rank == 0)


def accept(ranked: "Ranked", params: "RuleParams", segments: int) -> "Bool[Array, ' rows']":
    """Fast-dLLM's parallel decoding (NVlabs/Fast-dLLM v1, `threshold`)."""
    return reaches(ranked, params)


_HELP = "confidence to reach, or to exceed where strict (the published samplers differ, quirk Q11)."

OPTIONS = (
    Option("threshold", Scale, 0.9, _HELP, float),
    Option("threshold_strict", bool, False, _HELP, bool, offered=False),
)
ACCEPTANCE = Acceptance("threshold", accept)
RULE = TransferRule(
    "transfer",
    "threshold",
    "all at least as sure as `threshold`, and the surest (Fast-dLLM)",
    ACCEPTANCE,
    options=OPTIONS,
)
