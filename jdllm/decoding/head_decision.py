"""Masked logits for a head of one piece, and for one of which every card has a part of the ids."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.models.cards import AXIS, joined
from jdllm.models.leaf import VocabularyPart, logits
from jdllm.noise import gumbel, id_bits
from jdllm.pallas.masked_logits import (
    Level,
    RowDecision,
    RowPenalty,
    RowSampling,
    masked_logits,
    rows_at_once,
)
from jdllm.pallas.masked_logits.types import Ids
from jdllm.pallas.masked_logits.xla import decide_logits

Head = Float[Array, "vocab hidden"] | VocabularyPart

GATHERED_ROWS = 256
"""Rows whose logits exist at a time where cards gather them: of LLaDA 129 MB."""


def head_decision(
    hidden: Float[Array, "rows hidden"],
    head: Head,
    rows: RowSampling,
    level: Level,
    *,
    count: Int[Array, ""] | int | None = None,
) -> RowDecision:
    """`jdllm.pallas.masked_logits.masked_logits`, and the same on all cards that have parts of a head.

    Each card decides among its ids, and the cards tell each other their decisions. Filters need the logits of
    all ids, so that cards gather these.

    Arguments:
    - `hidden`: normed hidden rows, a bounded chunk.
    - `head`: the output matrix.
    - `rows`: how each row is drawn.
    - `level`: static; at least what any row's measure and filters need.
    - `count`: rows from here on need not be computed, and their results mean nothing.
    """
    if not isinstance(head, VocabularyPart):
        return masked_logits(hidden, head, rows, level, count=count)
    if level >= Level.FILTERED:
        return decide_logits(logits(hidden, head), rows, level)
    first = lax.axis_index(AXIS) * len(head.weight)
    own = masked_logits(hidden, head.weight, _of_part(rows, head, first), level, count=count)
    score = _scores(own, rows, first)
    token = jnp.minimum(own.token + first, head.ids - 1)
    cards = lax.axis_size(AXIS)
    parts, scores = jax.tree.map(lambda x: joined(x[None], cards, axis=0), (own._replace(token=token), score))
    return merged(parts, scores, level)


def head_rows_at_once(rows: int, chunks: int, head: Head, level: Level) -> int:
    """How many of `rows` rows a call of `head_decision` should take.

    Arguments:
    - `chunks`: into how many parts the plan cuts logits, which counts only where logits exist.
    - `head`: the output matrix.
    - `level`: what the rows' measures and filters need.
    """
    if not isinstance(head, VocabularyPart):
        return rows_at_once(rows, chunks, head, level)
    if level >= Level.FILTERED:
        return min(-(-rows // chunks), GATHERED_ROWS)
    return rows_at_once(rows, chunks, head.weight, level)


def merged(parts: RowDecision, score: Float[Array, "parts rows"], level: Level) -> RowDecision:
    """One decision of those among parts of the ids.

    Arguments:
    - `parts`: `[parts, rows]` each; tokens are those of the whole vocabulary. A part that has no id which a
      row may have says so by a `maximum` of -inf, or as low as f32 goes.
    - `score`: of each token, its logit with its noise.
    - `level`: what the parts were decided with.
    """
    best = score == score.max(axis=0)
    # Logits that are not numbers have no largest: any id does.
    token = jnp.where(best, parts.token, parts.token.max()).min(axis=0)
    logit = jnp.where(best & (parts.token == token), parts.logit, -jnp.inf).max(axis=0)
    maximum = parts.maximum.max(axis=0)
    decay = jnp.exp(parts.maximum - maximum)
    total = jnp.where(decay > 0, parts.total * decay, 0)
    whole = total.sum(axis=0)
    if level < Level.MOMENTS:
        nothing = jnp.zeros_like(whole)
        return RowDecision(token, logit, maximum, whole, nothing, nothing)
    at = parts.maximum.argmax(axis=0)
    others = jnp.where(jnp.arange(len(score))[:, None] == at, parts.second, parts.maximum)
    share = total / whole
    # Of a distribution of distributions: their entropies, each as often as it is drawn from, and the draw's.
    terms = share * (parts.negative_entropy + jnp.log(share))
    negative_entropy = jnp.where(share > 0, terms, 0).sum(axis=0)
    return RowDecision(token, logit, maximum, whole, others.max(axis=0), negative_entropy)


def _of_part(rows: RowSampling, head: VocabularyPart, first: Int[Array, ""]) -> RowSampling:
    """How rows are drawn among the ids of this card, which begin with `first`."""
    size = len(head.weight)

    def own(bans: Ids) -> Array:
        ids = jnp.asarray(bans) - first
        return jnp.where((ids >= 0) & (ids < size), ids, -1)

    limit = jnp.clip(jnp.minimum(jnp.asarray(rows.limit), head.ids) - first, 0, size)
    return rows._replace(
        limit=limit,
        token_bans=own(rows.token_bans),
        confidence_bans=own(rows.confidence_bans),
        penalty=None if rows.penalty is None else _penalty_of_part(rows.penalty, size, first),
        lowered=None,
        control=None,
        first_id=jnp.full_like(limit, first),
    )


def _penalty_of_part(penalty: RowPenalty, size: int, first: Int[Array, ""]) -> RowPenalty:
    occurrences = jnp.asarray(penalty.occurrences)
    missing = size * lax.axis_size(AXIS) - occurrences.shape[1]
    occurrences = jnp.pad(occurrences, ((0, 0), (0, missing)))
    return penalty._replace(occurrences=lax.dynamic_slice_in_dim(occurrences, first, size, axis=1))


def _scores(own: RowDecision, rows: RowSampling, first: Int[Array, ""]) -> Float[Array, " rows"]:
    """The logits of a card's tokens with their noise, as they were compared on this card."""
    ids = (own.token + first)[:, None]
    noise = gumbel(id_bits(rows.keys, jnp.asarray(rows.positions), ids))[:, 0]
    logit = own.logit * rows.divisor
    return jnp.where(rows.temperature > 0, logit + rows.temperature * noise, logit)
