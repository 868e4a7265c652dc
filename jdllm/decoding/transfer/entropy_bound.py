"""Entropy bound: commit nearly independent tokens together."""

from typing import TYPE_CHECKING

from jdllm.decoding.kinds import Scale
from jdllm.decoding.option import Option
from jdllm.decoding.transfer.rule import Acceptance, Measure, TransferRule

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

    from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: "Ranked", params: "RuleParams", segments: int) -> "Bool[Array, ' rows']":
    """Rows in rising entropy while the entropies before them sum to at most the bound.

    The first always commits. Confidences are negative entropies (`Measure.ENTROPY`). The sums run row by
    row, so that they do not depend on where a segment lies. Source: the entropy-bounded sampler of
    Ben-Hamu et al. 2025 (arXiv 2505.24857).
    """
    import jax.numpy as jnp  # what declares parameters is read without JAX
    from jax import lax

    def before(total: "Array", row: "tuple[Array, Array]") -> "tuple[Array, Array]":
        entropy, rank = row
        total = jnp.where(rank == 0, 0.0, total)
        return total + entropy, total

    _, spent = lax.scan(before, jnp.float32(0), (-ranked.confidence, ranked.rank))
    return (spent <= params.options["entropy_bound"]) | (ranked.rank == 0)


ACCEPTANCE = Acceptance("entropy_bound", accept, takes_long=True)
RULE = TransferRule(
    "transfer",
    "entropy_bound",
    "the lowest entropies while those before sum to at most `entropy_bound`",
    ACCEPTANCE,
    Measure.ENTROPY,
    options=(Option("entropy_bound", Scale, 0.1, "bound of the summed entropies, in nats.", float),),
)
