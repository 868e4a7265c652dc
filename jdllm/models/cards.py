"""One step on several cards: each has a part of the heads, of the inner widths and of the vocabulary.

A step runs on every card at once, inside `jax.shard_map`, with the configuration of one card's part
(`ModelConfig.on_card`). Hidden rows, tokens and decisions are the same on all cards. What a card adds to
hidden rows is a part of the sum, so that two sums over cards belong to each layer: behind the output
projection of attention, and behind the feed-forward layer. Source: Megatron-LM (Shoeybi et al. 2019).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jdllm.arrays import Tensor
from jdllm.pallas.exchange import rows_of_all_cards, sum_over_cards

AXIS = "cards"
"""The name of the mesh's axis."""

ADDRESSES = "addresses"
"""Beside the weights of cards that can exchange: `jdllm.pallas.exchange.addresses_of` these cards."""


def summed(x: Array, cards: int, addresses: Int32[Array, "1 words"] | None = None) -> Array:
    """The sum of what all cards have.

    Arguments:
    - `cards`: of the configuration; `x` itself where it is 1.
    - `addresses`: of this card, where the cards can exchange; otherwise XLA's collective adds.
    """
    if cards == 1:
        return x
    return lax.psum(x, AXIS) if addresses is None else sum_over_cards(x, addresses, AXIS)


def largest(x: Array, cards: int) -> Array:
    """The elementwise maximum of what all cards have.

    Arguments:
    - `cards`: of the configuration; `x` itself where it is 1.
    """
    return x if cards == 1 else lax.pmax(x, AXIS)


def joined(x: Array, cards: int, axis: int) -> Array:
    """What all cards have, one behind the other along an axis.

    Arguments:
    - `cards`: of the configuration; `x` itself where it is 1.
    """
    return x if cards == 1 else lax.all_gather(x, AXIS, axis=axis, tiled=True)


def joined_rows(
    x: Float[Array, "rows *sizes"], cards: int, addresses: Int32[Array, "1 words"] | None
) -> Float[Array, "all_rows *sizes"]:
    """The rows of all cards, those of the first card first.

    Arguments:
    - `cards`: which have rows; `x` itself where it is 1.
    - `addresses`: of this card, where the cards can exchange; otherwise XLA's collective joins.
    """
    if addresses is None or cards == 1:
        return joined(x, cards, axis=0)
    rows = rows_of_all_cards(x.reshape(len(x), -1), addresses, AXIS)
    return rows.reshape(-1, *x.shape[1:])


def own_heads(x: Array, heads: int, cards: int, copies: int, axis: int) -> Array:
    """Of values for all heads of a model those for the heads of this card.

    Arguments:
    - `heads`: of this card.
    - `cards`: of the configuration; `x` itself where it is 1.
    - `copies`: how many cards have the same heads.
    """
    if cards == 1:
        return x
    return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) // copies * heads, heads, axis)


def of_copies(x: Array, copies: int) -> Array:
    """What all cards have that have the key-value heads of this card, one behind the other along a new first
    axis.

    Arguments:
    - `copies`: how many these are.
    """
    if copies == 1:
        return x[None]
    first = lax.axis_index(AXIS) // copies * copies
    return lax.dynamic_slice_in_dim(lax.all_gather(x, AXIS), first, copies)


def rows_of_part(part: Float[Array, "o i"], ids: Int[Tensor, " rows"]) -> Float[Array, "rows i"]:
    """Some rows of a matrix of which each card has as many, those of the first card first."""
    own = ids - lax.axis_index(AXIS) * len(part)
    inside = (own >= 0) & (own < len(part))
    found = jnp.where(inside[:, None], part.at[own].get(mode="clip"), 0)
    return lax.psum(found, AXIS)
