"""Masked logits, portable form: one matrix product over a bounded chunk of rows, reduced at once."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jdllm.decoding.noise import gumbel, vocabulary_bits
from jdllm.models.layers import head_logits

Ids = Int[Array, "rows bans"]


class TokenNoise(NamedTuple):
    """What keys the token noise of each row, and its temperature (0: no noise)."""

    keys: tuple[UInt32[Array, " rows"], UInt32[Array, " rows"]]
    positions: Int[Array, " rows"]
    temperature: Float[Array, " rows"]


class RowDecision(NamedTuple):
    """What is kept of a row's logits.

    - `token`: argmax of the noised logits, the lowest id on ties.
    - `logit`: the clean f32 logit of `token`.
    - `maximum`, `total`: the largest clean logit and the sum of exp(logit - maximum), f32, so that the
      probability of `token` is exp(logit - maximum) / total.
    """

    token: Int[Array, " rows"]
    logit: Float[Array, " rows"]
    maximum: Float[Array, " rows"]
    total: Float[Array, " rows"]


def masked_logits(
    hidden: Float[Array, "rows d"],
    head: Float[Array, "vocab d"],
    noise: TokenNoise,
    token_bans: Ids,
    confidence_bans: Ids,
) -> RowDecision:
    """Choose a token for each row and measure the model's probability of it.

    Arguments:
    - `hidden`: normed hidden rows, a bounded chunk: the logits of the chunk exist in f32.
    - `head`: the output matrix.
    - `noise`: token t of a row is argmax(logits + temperature * Gumbel), a sample of
      softmax(logits / temperature).
    - `token_bans`: ids removed from a row's distribution altogether; -1 stands for none.
    - `confidence_bans`: ids further removed from `maximum` and `total` only; -1 stands for none.

    Returns a `RowDecision` of `[rows]` arrays.
    """
    ids = jnp.arange(head.shape[0])
    logits = _without(head_logits(hidden, head), ids, token_bans)

    def noised() -> Array:
        bits = vocabulary_bits(noise.keys, noise.positions, head.shape[0])
        # argmax inside the branch, so that the noised logits need no buffer of their own
        scale = noise.temperature[:, None]
        return jnp.argmax(jnp.where(scale > 0, logits + scale * gumbel(bits), logits), axis=-1)

    token = lax.cond(jnp.any(noise.temperature > 0), noised, lambda: jnp.argmax(logits, axis=-1))
    logit = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    measured = _without(logits, ids, confidence_bans)
    maximum = measured.max(axis=-1)
    total = jnp.exp(measured - maximum[:, None]).sum(axis=-1)
    return RowDecision(token.astype(jnp.int32), logit, maximum, total)


def _without(logits: Array, ids: Array, bans: Ids) -> Array:
    for column in range(bans.shape[1]):
        logits = jnp.where(ids == bans[:, column, None], -jnp.inf, logits)
    return logits
