"""Editing: steps that fill masks of a block also replace tokens that earlier steps filled (LLaDA2.1)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.pallas.masked_logits import RowLowered

NEVER = 2
"""A probability that nothing exceeds: the threshold of a segment that does not edit."""


class Editing(NamedTuple):
    """How the segments of a batch edit.

    The head rows of a segment that edits are all rows of its block that were masked when the block was
    entered, filled or not.

    - `threshold`: f32, the probability that a token exceeds that replaces another one; `NEVER` for segments
      that do not edit.
    - `post_left`: int32, how many more steps the block may take without a mask; 0 where a segment does not
      edit.
    - `left`: int32, the packed row to the left of each head row in its block, -1 where there is none; `None`
      where no segment has a penalty.
    - `penalty`: f32, taken from the logit of the token in the row to the left; 0 changes nothing.
    """

    threshold: Float[Tensor, " segments"]
    post_left: Int[Tensor, " segments"]
    left: Int[Tensor, " head"] | None
    penalty: Float[Tensor, " segments"]


def lowered_of(
    editing: Editing, tokens: Int[Array, " rows"], segment: Int[Tensor, " head"]
) -> RowLowered | None:
    """The token of each head row's left neighbour as it stands, a mask or not, and its penalty.

    Arguments:
    - `tokens`: of the packed rows, before the step.
    - `segment`: of each head row; the number of segments for padding.
    """
    if editing.left is None:
        return None
    left = jnp.asarray(editing.left)
    penalty = jnp.append(jnp.asarray(editing.penalty, jnp.float32), 0)[segment]
    return RowLowered(tokens[left], jnp.where(left < 0, 0, penalty))


def editable(
    editing: Editing, masked: Bool[Array, " head"], segment: Int[Tensor, " head"]
) -> Bool[Array, " head"]:
    """Which head rows hold a token that the next step may replace.

    Arguments:
    - `masked`: which of them are masked.
    - `segment`: of each; the number of segments for padding.
    """
    edits = jnp.append(jnp.asarray(editing.threshold) <= 1, jnp.array([False]))
    return edits[segment] & ~masked


def replaced(
    editing: Editing,
    evaluated: Bool[Array, " head"],
    segment: Int[Tensor, " head"],
    before: Int[Array, " head"],
    token: Int[Array, " head"],
    logprob: Float[Array, " head"],
) -> Bool[Array, " head"]:
    """Which filled head rows take the token that a step has chosen for them.

    Arguments:
    - `evaluated`: head rows that are `editable`.
    - `segment`: of each head row; the number of segments for padding.
    - `before`: tokens before the step.
    - `token`, `logprob`: the choices of the step, and the logarithms of their probabilities.

    The comparison is strict, as published: a threshold of 1 edits nothing.
    """
    threshold = jnp.append(jnp.asarray(editing.threshold, jnp.float32), NEVER)[segment]
    return evaluated & (token != before) & (jnp.exp(logprob) > threshold)


def post_left_after(
    post_left: Int[Array, " segments"],
    masked: Int[Array, " segments"],
    edited: Int[Array, " segments"],
) -> Int[Array, " segments"]:
    """`Editing.post_left` after a step.

    Arguments:
    - `post_left`: before the step.
    - `masked`: masked rows of each segment before the step.
    - `edited`: how many rows of each segment the step replaced. A step without a mask that replaces nothing
      is the last one: the next one would find the same.
    """
    return jnp.where(masked > 0, post_left, jnp.where(edited > 0, jnp.maximum(post_left - 1, 0), 0))
