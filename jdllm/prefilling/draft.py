"""The second stage: an answer is drafted without the context, for the chunks to be scored with."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.decoding.prefilling import Prefilling
from jdllm.execution.transformer import Wanted, forward_wanted, logits
from jdllm.models.block import RowInts, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.prefilling.segments import Segment

_NEVER = np.asarray(2, np.float32)


class Timetable(NamedTuple):
    """What the rounds of a draft fill.

    - `quota`: int32, how many of the surest slots each round fills at least.
    - `threshold`: f32; slots at least as sure are filled too.
    """

    quota: Int[Tensor, " rounds"]
    threshold: Float[Tensor, ""]


def timetable(prefilling: Prefilling, threshold: float) -> Timetable:
    """The rounds after the first slot, padded to the length of the draft with rounds that fill nothing.

    Arguments:
    - `threshold`: of the request, for drafts without rounds or steps.
    """
    slots = prefilling.draft_length
    quota = np.zeros(slots, np.int32)
    if prefilling.draft_steps is not None:
        quota[0] = prefilling.draft_steps - 1
        return Timetable(quota, _NEVER)
    quota[: prefilling.draft_rounds] = 1
    return Timetable(quota, np.asarray(threshold, np.float32) if prefilling.draft_rounds is None else _NEVER)


def draft_segment(
    prefix: Int[np.ndarray, " prefix"], query: Int[np.ndarray, " query"], slots: int, mask_id: int
) -> Segment:
    """Instruction and query, which see each other, and masked slots behind them, which see everything."""
    tokens = np.concatenate([prefix, query, np.full(slots, mask_id)])
    before = len(prefix) + len(query)
    return Segment.of(tokens, np.where(np.arange(len(tokens)) < before, before, len(tokens)))


def draft(
    params: Params,
    tokens: RowInts,
    rows: Rows,
    slots: Int[Tensor, " slots"],
    table: Timetable,
    *,
    config: ModelConfig,
    mask_id: int,
) -> Int[Array, " slots+1"]:
    """Fill a draft: the first slot, however sure it is, and then the surest ones.

    Arguments:
    - `tokens`, `rows`: as `draft_segment` lays them out.
    - `slots`: packed rows of the draft, one after another.
    - `config`, `mask_id`: static.

    Returns the slots, of which those that no round filled are masks, and how many evaluations that took.
    Exact where the model's logits are shifted: as published, at temperature 0. Source: Prefilling-dLLM.
    """
    slots, tokens = jnp.asarray(slots), jnp.asarray(tokens)
    back = 1 if config.logits_shift else 0
    wanted = Wanted(slots - back, jnp.ones(slots.shape, bool))
    quota = jnp.concatenate([jnp.ones(1, jnp.int32), jnp.asarray(table.quota)])

    def fill(round: Int[Array, ""], tokens: Int[Array, " rows"]) -> Int[Array, " rows"]:
        hidden = forward_wanted(params, config, tokens, rows, wanted)
        found = logits(params, config, hidden)
        sure = 1 / jnp.exp(found - found.max(axis=-1, keepdims=True)).sum(axis=-1)
        masked = tokens[slots] == mask_id
        first = (round == 0) & (jnp.arange(len(slots)) == 0)
        chosen = jnp.where(round == 0, first, masked & _surest(sure, masked, quota[round], table.threshold))
        return tokens.at[slots].set(jnp.where(chosen, jnp.argmax(found, axis=-1), tokens[slots]))

    def unfinished(carry: tuple[Array, Array]) -> Bool[Array, ""]:
        round, tokens = carry
        return (round < quota.size) & (quota[round] > 0) & jnp.any(tokens[slots] == mask_id)

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return carry[0] + 1, fill(*carry)

    rounds, tokens = lax.while_loop(unfinished, step, (jnp.int32(0), tokens))
    return jnp.append(tokens[slots], rounds)


def _surest(
    sure: Float[Array, " slots"],
    masked: Bool[Array, " slots"],
    quota: Int[Array, ""],
    threshold: Float[Tensor, ""],
) -> Bool[Array, " slots"]:
    """The masked slots that are among the `quota` surest, or sure enough; ties go to the first."""
    order = jnp.argsort(jnp.where(masked, -sure, jnp.inf), stable=True)
    rank = jnp.zeros(len(order), jnp.int32).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
    return (rank < quota) | (sure >= threshold)
