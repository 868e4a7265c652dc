"""Tokens that stay on the device, for parts that are packed before the host has seen them."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jdllm.arrays import Tensor
from jdllm.decoding.batch import Batch, Trace


class Unseen(NamedTuple):
    """The tokens that parts before leave on the device, and the packed rows that take them.

    - `refreshed`, `reused`: what `left_by` made of the last refresh, and of the last single step that reused.
    - `source`: for each packed row an index into `refreshed`, or, behind the end of `refreshed`, into
      `reused`; -1 where the host knows the token.
    """

    refreshed: Int[Tensor, " left"]
    reused: Int[Tensor, " left"]
    source: Int[Tensor, " rows"]


def left_by(trace: Trace, batch: Batch, size: int) -> Int[Array, " left"]:
    """The tokens of the head rows after a single step.

    Arguments:
    - `trace`: of the step; `batch`: before the step.
    - `size`: how many tokens to return. Further head rows are left out, and what is missing is 0.
    """
    before = jnp.asarray(batch.tokens)[batch.head.row]
    return padded(jnp.where(trace.committed[0], trace.tokens[0], before), size)


def padded(tokens: Int[Array, " tokens"], size: int) -> Int[Array, " left"]:
    """The first `size` tokens; what is missing is 0."""
    return jnp.pad(tokens[:size], (0, max(0, size - len(tokens))))


def with_unseen(tokens: Int[Tensor, " rows"], unseen: Unseen) -> Int[Array, " rows"]:
    """The tokens of packed rows, of which some come from parts before."""
    left = jnp.concatenate([jnp.asarray(unseen.refreshed), jnp.asarray(unseen.reused)])
    return taken(tokens, left, unseen.source)


def taken(
    tokens: Int[Tensor, " rows"], left: Int[Tensor, " left"], source: Int[Tensor, " rows"]
) -> Int[Array, " rows"]:
    """The tokens of rows.

    Arguments:
    - `tokens`: that the host knows; `left`: that parts before leave on the device.
    - `source`: for each row an index into `left`; -1 where the host knows the token.
    """
    return jnp.where(jnp.asarray(source) < 0, tokens, jnp.asarray(left)[source])
