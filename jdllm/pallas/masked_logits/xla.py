"""Masked logits, portable form: one matrix product over a bounded chunk of rows, reduced at once."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.layers import head_logits
from jdllm.noise import gumbel, id_bits
from jdllm.pallas.listed import LISTED
from jdllm.pallas.masked_logits.types import (
    ANY,
    Ids,
    Keys,
    Level,
    Likeliest,
    RowControl,
    RowDecision,
    RowPenalty,
    RowSampling,
)

Logits = Float[Array, "rows vocab"]


def masked_logits_xla(
    hidden: Float[Array, "rows d"], head: Float[Array, "vocab d"], rows: RowSampling, level: Level
) -> RowDecision:
    """Portable form of `jdllm.pallas.masked_logits.masked_logits`; the logits of all rows exist in f32."""
    return decide_logits(head_logits(hidden, head), rows, level)


def decide_logits(logits: Logits, rows: RowSampling, level: Level) -> RowDecision:
    """What `masked_logits` returns, of f32 logits in place of a product."""
    ids = jnp.arange(logits.shape[1])
    if rows.control is not None and level >= Level.FILTERED:
        # The barrier is for the reason that the next one has.
        logits = lax.optimization_barrier(controlled(logits, rows.control, jnp.asarray(rows.positions)))
    if rows.penalty is not None:
        # Sums over the vocabulary, fused with the penalties, could differ in the last bit from the sums of a
        # batch without any.
        logits = lax.optimization_barrier(penalised(logits, rows.penalty))
    if rows.lowered is not None and level >= Level.FILTERED:
        own = ids == jnp.asarray(rows.lowered.ids)[:, None]
        by = jnp.asarray(rows.lowered.by)[:, None]
        logits = lax.optimization_barrier(jnp.where(own, logits - by, logits))
    logits = allowed(logits, rows.limit, rows.token_bans)
    scale = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    divisor = rows.divisor[:, None]
    choices = logits
    if level >= Level.FILTERED:
        choices = _filtered(logits, scale[:, None], rows)
        logits = jnp.where(rows.tempered[:, None], choices, logits)
    token = drawn(choices, rows.temperature, rows.keys, jnp.asarray(rows.positions), rows.first_id)
    measured = _without(logits / divisor, ids, rows.confidence_bans)
    maximum = measured.max(axis=-1)
    total = jnp.exp(measured - maximum[:, None]).sum(axis=-1)
    logit = jnp.take_along_axis(logits / divisor, token[:, None], axis=-1)[:, 0]
    second = negative_entropy = jnp.zeros_like(maximum)
    if level >= Level.MOMENTS:
        # The level follows from what all rows of a batch ask for. Without the barrier the sums above would be
        # fused differently at this one, and a row's confidence would depend on its company in the last bit.
        logits, maximum, total = lax.optimization_barrier((logits, maximum, total))
        measured = _without(logits / divisor, ids, rows.confidence_bans)
        second = jnp.where(ids == jnp.argmax(measured, axis=-1)[:, None], -jnp.inf, measured).max(axis=-1)
        p = jnp.exp(measured - maximum[:, None]) / total[:, None]
        negative_entropy = (p * jnp.log(p + 1e-10)).sum(axis=-1)
    listed = likeliest(measured, rows.listed) if level >= Level.FILTERED else None
    return RowDecision(token, logit, maximum, total, second, negative_entropy, listed)


def controlled(logits: Logits, control: RowControl, positions: Int[Array, " rows"]) -> Logits:
    """The logits after their controls."""
    words = jnp.asarray(control.allowed)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    has = bits.reshape(len(words), -1)[:, : logits.shape[1]] > 0
    early = (positions < jnp.asarray(control.until))[:, None]
    by = jnp.where(early, jnp.asarray(control.early), jnp.asarray(control.late))
    at = jnp.arange(len(words))[:, None], jnp.asarray(control.ids)
    raised = logits.at[at].add(by, mode="drop", unique_indices=True)
    if control.words is not None:
        ids = _last_of_words(jnp.asarray(control.words), jnp.asarray(control.left))
        raised = raised.at[at[0], ids].set(-jnp.inf, mode="drop")
    return jnp.where(has, raised, -jnp.inf)


def _last_of_words(
    words: Int[Array, "rows words length"], left: Int[Array, "rows before"]
) -> Int[Array, "rows words"]:
    """The last id of each word that a row would complete; an id outside any vocabulary for the others."""
    before = (words[..., :-1] == left[:, None]) | (words[..., :-1] == ANY)
    last = words[..., -1]
    return jnp.where(before.all(axis=-1) & (last != ANY), last, jnp.iinfo(jnp.int32).max)


def penalised(logits: Logits, penalty: RowPenalty) -> Logits:
    """The logits after their penalties."""
    occurrences = jnp.asarray(penalty.occurrences)[penalty.sequence]
    columns = penalty.repetition, penalty.presence, penalty.frequency
    repetition, presence, frequency = (jnp.asarray(x)[:, None] for x in columns)
    divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
    times = jnp.maximum(occurrences - 1, 0)
    logits = jnp.where(occurrences > 0, divided, logits)
    return logits - frequency * times - jnp.where(times > 0, presence, 0)


def likeliest(values: Logits, listed: Bool[Tensor, " rows"]) -> Likeliest:
    """The largest values of each row; nothing where no row is `listed`.

    One after another, each the largest of those behind the one before: for so many of a whole vocabulary XLA
    sorts them all in `lax.top_k` on a card, with their ids, and takes memory for it.
    """
    ids = jnp.arange(values.shape[1])

    def following(last: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        id, value = (x[:, None] for x in last)
        behind = (values < value) | ((values == value) & (ids > id))
        left = jnp.where(behind, values, -jnp.inf)
        found = jnp.argmax(left, axis=-1).astype(jnp.int32), left.max(axis=-1)
        return found, found

    def found() -> Likeliest:
        rows = len(values)
        before = jnp.full(rows, -1, jnp.int32), jnp.full(rows, jnp.inf)
        columns = lax.scan(following, before, None, length=LISTED)[1]
        return Likeliest(*(x.T for x in columns))

    return lax.cond(jnp.any(listed), found, lambda: Likeliest.nothing(len(values)))


def allowed(logits: Logits, limit: Int[Tensor, " rows"], token_bans: Ids) -> Logits:
    """The logits, -inf for ids from `limit` on and for those banned."""
    ids = jnp.arange(logits.shape[1])
    return jnp.where(ids < limit[:, None], _without(logits, ids, token_bans), -jnp.inf)


def drawn(
    logits: Logits,
    temperature: Float[Tensor, " rows"],
    keys: Keys,
    positions: Int[Array, " rows"],
    first_id: Int[Tensor, " rows"] | None = None,
) -> Int[Array, " rows"]:
    """argmax of each row, with its noise where its temperature is above 0; int32, the lowest id on ties.

    The noise depends on the key, the position and the id only: it is the same whatever is drawn from.

    Arguments:
    - `first_id`: as `RowSampling` has it.
    """

    def noised() -> Array:
        ids = jnp.arange(logits.shape[1])[None, :]
        bits = id_bits(keys, positions, ids if first_id is None else first_id[:, None] + ids)
        # argmax inside the branch, so that the noised logits need no buffer of their own
        scale = temperature[:, None]
        return jnp.argmax(jnp.where(scale > 0, logits + scale * gumbel(bits), logits), axis=-1)

    token = lax.cond(jnp.any(temperature > 0), noised, lambda: jnp.argmax(logits, axis=-1))
    return token.astype(jnp.int32)


def _without(logits: Logits, ids: Array, bans: Ids) -> Logits:
    for column in range(bans.shape[1]):
        logits = jnp.where(ids == bans[:, column, None], -jnp.inf, logits)
    return logits


def _filtered(logits: Logits, divisor: Array, rows: RowSampling) -> Logits:
    """Keep the shortest head of the sorted distribution that exceeds `top_p`, at most `top_k` of it, and what
    is at least `min_p` times as likely as the likeliest. With `top_k_first` the distribution is that of the
    `top_k` alone, and its head need not exceed `top_p`, but reach it.

    Values equal to the last kept one stay too.
    """
    vocab, top_p = logits.shape[-1], rows.top_p[:, None]
    falling = -jnp.sort(-logits, axis=-1)
    within = jnp.clip(rows.top_k, 1, vocab)
    least = jnp.take_along_axis(falling, within[:, None] - 1, axis=-1)
    outside = rows.top_k_first[:, None] & (falling < least)
    p = jax.nn.softmax(jnp.where(outside, -jnp.inf, falling / divisor), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    kept = jnp.sum(jnp.where(rows.top_k_first[:, None], before < top_p, before <= top_p), axis=-1)
    kept = jnp.where(rows.top_p < 1, kept, vocab)
    last = jnp.clip(jnp.minimum(kept, within), 1, vocab) - 1
    cut = jnp.take_along_axis(falling, last[:, None], axis=-1)
    cut = jnp.maximum(cut, falling[:, :1] + divisor * jnp.log(rows.min_p)[:, None])
    return jnp.where(logits >= cut, logits, -jnp.inf)
