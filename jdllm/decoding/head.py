"""The head for the rows that are still masked, a bounded chunk at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.decoding.batch import HeadRows, SegmentParams
from jdllm.decoding.head_decision import head_decision, head_rows_at_once
from jdllm.decoding.penalty import Penalty
from jdllm.decoding.transfer.rule import Measure
from jdllm.execution.transformer import final_norm
from jdllm.models.block import Hidden
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, head_weights
from jdllm.noise import Purpose, position_bits, step_keys, uniform
from jdllm.pallas.masked_logits import (
    Level,
    Likeliest,
    RowDecision,
    RowLowered,
    RowPenalty,
    RowSampling,
)

_LAST = -1e30


class Sources(NamedTuple):
    """Rows whose hidden states predict the tokens of the head rows, and those of their unguided copies."""

    guided: Int[Tensor, " head"]
    unguided: Int[Tensor, " head"]


class Choice(NamedTuple):
    """The token of each head row, how sure the sampler is of it (higher commits first), and its
    log-probability in the distribution that probabilities are measured on; the likeliest ids of that
    distribution, with log-probabilities."""

    token: Int[Array, " head"]
    confidence: Float[Array, " head"]
    logprob: Float[Array, " head"]
    likeliest: Likeliest | None


def gather_guided(
    params: Params,
    config: ModelConfig,
    hidden: Hidden,
    sources: Sources,
    guidance: Float[Array, " head"],
) -> Float[Array, "head hidden"]:
    """Normed hidden rows of `sources`, with classifier-free guidance applied."""
    return guide(params, config, hidden[sources.guided], hidden[sources.unguided], guidance)


def source_rows(config: ModelConfig, head: HeadRows, positions: Int[Tensor, " head"]) -> Sources:
    """The packed rows that predict the tokens of `head`.

    With shifted logits a token is predicted by the row before it; the first row of a sequence keeps its own.
    """
    back = jnp.where(positions > 0, 1, 0) if config.logits_shift else 0
    return Sources(jnp.asarray(head.row) - back, jnp.asarray(head.unguided) - back)


def guide(
    params: Params,
    config: ModelConfig,
    guided: Float[Array, "head hidden"],
    unguided: Float[Array, "head hidden"],
    guidance: Float[Array, " head"],
) -> Float[Array, "head hidden"]:
    """Norm hidden rows and apply classifier-free guidance.

    The head is linear, so combining normed hidden rows as u + (scale + 1)(c - u) gives the guided logits
    with one product instead of two. Without guidance u is c itself and the row is unchanged.
    """
    guided, unguided = (final_norm(params, config, h) for h in (guided, unguided))
    scale = (guidance + 1).astype(jnp.float32)[:, None]
    u = unguided.astype(jnp.float32)
    combined = u + scale * (guided.astype(jnp.float32) - u)
    return jnp.where((guidance > 0)[:, None], combined.astype(guided.dtype), guided)


def choose(
    params: Params,
    config: ModelConfig,
    hidden: Hidden,
    sources: Sources,
    head: HeadRows,
    positions: Int[Array, " head"],
    segments: SegmentParams,
    step: Int[Tensor, " segments"],
    count: Int[Array, ""],
    plain: Int[Array, ""],
    penalty: Penalty | None = None,
    lowered: RowLowered | None = None,
    *,
    chunks: int,
    level: Level,
) -> Choice:
    """Evaluate the first `count` head rows; the others are neither computed nor meaningful.

    Arguments:
    - `hidden`: rows after the last layer.
    - `sources`: which of them predict the tokens of `head`.
    - `head`, `positions`: the rows to evaluate and their absolute positions.
    - `segments`, `step`: parameters of the segments and the denoising step that each is in.
    - `count`: rows to evaluate; of several chunks those beyond it are skipped on the device.
    - `plain`: how many of them, the first, have no control and no filter and are not listed.
    - `penalty`: of the segments; `None` where none has one.
    - `lowered`: of the rows, none of them plain; `None` where none has one.
    - `chunks`: into how many chunks the head rows are cut where logits exist, which they do for one chunk at
      a time; static.
    - `level`: what the segments' measures, controls, filters and lists need; static. Plain rows never meet
      the last three.
    """
    total = head.row.shape[0]
    everything = head, positions, sources, lowered

    def evaluate(
        part: tuple[HeadRows, Array, Sources, RowLowered | None], live: Int[Array, ""], level: Level
    ) -> Choice:
        rows, at, own, lower = part
        guidance = jnp.asarray(segments.guidance)[rows.segment]
        h = gather_guided(params, config, hidden, own, guidance)
        lower = lower if level >= Level.FILTERED else None
        return decide(params, h, rows.segment, at, segments, step, live, penalty, lower, level=level)

    def in_chunks(begin: Array | int, end: Array, level: Level, out: Choice) -> Choice:
        """Rows [begin, end) into `out`."""
        size = head_rows_at_once(total, chunks, head_weights(params), level)

        def chunk(index: Array, out: Choice) -> Choice:
            start = jnp.minimum(begin + index * size, total - size)
            part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), everything)
            chosen = evaluate(part, end - start, level)
            own = start + jnp.arange(size) >= begin

            def put(whole: Array, new: Array) -> Array:
                new = where_rows(own, new, lax.dynamic_slice_in_dim(whole, start, size))
                return lax.dynamic_update_slice_in_dim(whole, new, start, 0)

            return jax.tree.map(put, out, chosen)

        return lax.fori_loop(0, (end - begin + size - 1) // size, chunk, out)

    unfiltered = min(level, Level.MOMENTS)
    if head_rows_at_once(total, chunks, head_weights(params), unfiltered) == total:
        out = evaluate(everything, plain, unfiltered)
    else:
        empty = Choice(jnp.zeros(total, jnp.int32), jnp.zeros(total), jnp.zeros(total), None)
        out = in_chunks(0, plain, unfiltered, empty)
    if level < Level.FILTERED:
        return out
    return in_chunks(plain, count, level, out._replace(likeliest=Likeliest.nothing(total)))


def where_rows(rows: Bool[Array, " rows"], x: Array, y: Array | int) -> Array:
    """`x` in some of its rows, `y` in the others."""
    return jnp.where(jnp.expand_dims(rows, range(1, x.ndim)), x, y)


def decide(
    params: Params,
    h: Float[Array, "head hidden"],
    segment: Int[Tensor, " head"],
    positions: Int[Array, " head"],
    segments: SegmentParams,
    step: Int[Tensor, " segments"],
    count: Int[Array, ""] | int,
    penalty: Penalty | None = None,
    lowered: RowLowered | None = None,
    *,
    level: Level,
) -> Choice:
    """Evaluate the first `count` of a chunk of normed hidden rows.

    Arguments:
    - `h`: rows that predict tokens, as `guide` makes them.
    - `segment`, `positions`: of the tokens.
    - `segments`, `step`: parameters of the segments and the denoising step that each is in.
    - `count`: may exceed the rows.
    - `penalty`: of the segments; `None` where none has one. Log-probabilities are those after the penalties.
    - `lowered`: of the rows, likewise.
    - `level`: at least what the segments' measures, controls, filters and lists need; static.
    """
    seeds = jnp.asarray(segments.seed)
    token_keys = step_keys(seeds, Purpose.TOKEN, step)
    order_keys = step_keys(seeds, Purpose.ORDER, step)
    if level < Level.FILTERED:
        segments = segments._replace(control=None)
    part, keys, order = jax.tree.map(lambda x: jnp.asarray(x)[segment], (segments, token_keys, order_keys))
    rows = _row_sampling(part, keys, positions, penalty and penalty.of_rows(jnp.asarray(segment)))
    rows = rows._replace(lowered=lowered)
    decision = head_decision(h, head_weights(params), rows, level, count=count)
    draw = uniform(position_bits(order, positions))
    # Ids that are kept out of the confidence may be above all others: at most certain.
    logprob = jnp.minimum(decision.logit - decision.maximum - jnp.log(decision.total), 0)
    likeliest = decision.likeliest
    if likeliest is not None:
        maximum, total = decision.maximum[:, None], decision.total[:, None]
        values = jnp.minimum(likeliest.values - maximum - jnp.log(total), 0)
        likeliest = likeliest._replace(values=values)
    confidence = _confidence(decision, part, positions, draw, h.dtype)
    return Choice(decision.token, confidence, logprob, likeliest)


def _row_sampling(
    part: SegmentParams, keys: tuple[Array, Array], positions: Array, penalty: RowPenalty | None
) -> RowSampling:
    return RowSampling(
        keys=keys,
        positions=positions,
        temperature=part.temperature,
        tempered=part.tempered,
        top_k=part.top_k,
        top_p=part.top_p,
        min_p=part.min_p,
        top_k_first=part.top_k_first,
        limit=part.limit,
        token_bans=part.token_bans,
        confidence_bans=jnp.where(part.stop_last[:, None], -1, part.confidence_bans),
        listed=part.listed,
        penalty=penalty,
        control=part.control,
    )


def _confidence(
    decision: RowDecision,
    part: SegmentParams,
    positions: Int[Array, " rows"],
    draw: Float[Array, " rows"],
    dtype: jnp.dtype,
) -> Float[Array, " rows"]:
    probability = jnp.exp(decision.logit - decision.maximum) / decision.total
    banned = jnp.any(decision.token[:, None] == part.confidence_bans, axis=1)
    probability = jnp.where(banned & ~part.stop_last, 0.0, probability)
    margin = (1 - jnp.exp(decision.second - decision.maximum)) / decision.total
    by_measure = {
        Measure.PROBABILITY: probability,
        Measure.MARGIN: margin,
        Measure.ENTROPY: decision.negative_entropy,
    }
    confidence = jnp.where(part.measure == Measure.POSITION, -positions.astype(jnp.float32), draw)
    for measure, values in by_measure.items():
        rounded = jnp.where(part.coarse_confidence, values.astype(dtype).astype(jnp.float32), values)
        confidence = jnp.where(part.measure == measure, rounded, confidence)
    return jnp.where(banned & part.stop_last, _LAST, confidence)
