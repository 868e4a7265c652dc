"""Streaming-dLLM's threshold: the fewer masks a block has left, the lower it is."""

from typing import TYPE_CHECKING

from jdllm.decoding.kinds import Share
from jdllm.decoding.option import Option
from jdllm.decoding.transfer import threshold
from jdllm.decoding.transfer.rule import Acceptance, TransferRule

if TYPE_CHECKING:
    from jaxtyping import Array, Bool

    from jdllm.decoding.transfer.ranking import Ranked, RuleParams


def accept(ranked: "Ranked", params: "RuleParams", segments: int) -> "Bool[Array, ' rows']":
    """Rows that reach threshold * (1 - threshold_fall * (1 - r)), and the first in any case.

    r is the share of the block's masked rows that are still masked, so the first step of a block has the
    whole threshold. The published code (xiaoshideta/Streaming-dLLM) also counts the masked rows behind the
    block, in both parts of the share. There the fall depends on how many such rows a step evaluates; here
    tokens follow from the block alone, with every cache and every `gen_length`. Behind a block of B rows with
    S evaluated rows, the published fall is this one times B / (B + S).
    """
    import jax.numpy as jnp  # what declares parameters is read without JAX

    # Masks in the prompt, which an official sampler fills too, come in addition to the block's.
    left = jnp.minimum(ranked.count / jnp.maximum(params.quota, 1), 1)
    return threshold.reaches(ranked, params, 1 - params.options["threshold_fall"] * (1 - left))


RULE = TransferRule(
    "transfer",
    "falling_threshold",
    "all at least as sure as `threshold`, which falls by `threshold_fall` as the block fills, and the surest"
    " (Streaming-dLLM)",
    Acceptance("falling_threshold", accept),
    options=(
        *threshold.OPTIONS,
        Option(
            "threshold_fall",
            Share,
            0.3,
            "fall of the threshold as the block fills: with the share f of the block's masks filled,"
            " threshold * (1 - threshold_fall * f) counts.",
            float,
        ),
    ),
)
