"""The denoising step, and the device loop over the steps of a dispatch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.chunks import ChunkConfig
from jdllm.decoding.batch import Batch, HeadRows, SegmentParams, Trace
from jdllm.decoding.editing import editable, lowered_of, post_left_after, replaced
from jdllm.decoding.head import Choice, Sources, choose, source_rows, where_rows
from jdllm.decoding.transfer.ranking import Candidates, RuleParams
from jdllm.decoding.transfer.select import select
from jdllm.execution.transformer import Wanted, forward, forward_wanted
from jdllm.models.block import Hidden, RowInts
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.noise import Purpose, gumbel, position_bits, step_keys, uniform
from jdllm.pallas.masked_logits import Level, Likeliest, RowLowered

SelectionBits = Callable[[Array, Array, Array, Array], Array]
"""(seed [segments, 2], step [segments], segment [rows], position [rows]) -> uint32 [rows]."""


class AskedRows(NamedTuple):
    """What a step asks the head for, the rows that it evaluates first, and of these the plain ones.

    - `masked`: which head rows are masked, in their given order.
    - `evaluated`: which ones the step evaluates: those, and where a segment edits those that it may replace.
    - `place`: where each of those is among the following.
    - `plain`: how many of them have no control and no filter and are not listed.
    - `rows`, `positions`, `sources`: head rows, their positions, and the packed rows that predict them.
    - `lowered`: an id of each of them whose logit is lowered; `None` where none has one.
    """

    masked: Bool[Array, " head"]
    evaluated: Bool[Array, " head"]
    place: Int[Array, " head"]
    plain: Int[Array, ""]
    rows: HeadRows
    positions: Int[Array, " head"]
    sources: Sources
    lowered: RowLowered | None

    @property
    def count(self) -> Int[Array, ""]:
        """How many of them are asked for."""
        return self.evaluated.sum()


def keyed_bits(seed: Array, step: Array, segment: Array, positions: Array) -> Array:
    """Random bits for the draws that select rows, keyed as `jdllm.noise` describes."""
    keys = step_keys(seed, Purpose.SELECTION, step)
    return position_bits((keys[0][segment], keys[1][segment]), positions)


def denoise(
    params: Params,
    batch: Batch,
    max_steps: Int[Array, ""],
    *,
    config: ModelConfig,
    mask_id: int,
    chunks: ChunkConfig,
    level: Level,
    selection_bits: SelectionBits = keyed_bits,
) -> Trace:
    """Run up to `max_steps` denoising steps; stop as soon as any segment has finished its block.

    Arguments:
    - `params`: stacked weights.
    - `batch`: the packed batch. `batch.head` lists the rows of every segment up to the end of its current
      block that are masked now, in rising order of position; later rows cannot commit and are not evaluated.
      Of a segment that edits it lists the rows of the block that were masked when the block was entered.
    - `max_steps`: int32, at most the columns of the segments' step tables. Tokens do not depend on it.
      Those with an unguided copy are at most half as many as there is room for.
    - `config`, `mask_id`, `chunks`, `level`: static.
    - `selection_bits`: static; the source of the draws that select rows.

    Returns the trace. Exact: the official LLaDA and Dream samplers take the same steps.
    """

    def hidden_of(tokens: Int[Array, " rows"], asked: AskedRows) -> tuple[Hidden, Sources]:
        if not chunks.layers_whole:
            return forward(params, config, tokens, batch.rows, chunks=chunks), asked.sources
        wanted, sources = wanted_of(asked)
        return forward_wanted(params, config, tokens, batch.rows, wanted), sources

    return run_steps(
        hidden_of,
        params,
        batch,
        max_steps,
        config=config,
        mask_id=mask_id,
        logits_chunks=chunks.logits,
        level=level,
        selection_bits=selection_bits,
    )


def run_steps(
    hidden_of: Callable[[Int[Array, " rows"], AskedRows], tuple[Hidden, Sources]],
    params: Params,
    batch: Batch,
    max_steps: Int[Array, ""] | None,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    selection_bits: SelectionBits,
) -> Trace:
    """The device loop of `denoise`, for any way to the hidden rows.

    Arguments:
    - `hidden_of`: takes the tokens of the packed rows and the rows that are asked for; returns hidden rows
      after the last layer, and which of them predict tokens.
    - `params`, `batch`: stacked weights, and the packed batch.
    - `max_steps`: int32, at most the columns of the segments' step tables. `None` for one step without a
      loop: a loop whose turns the device counts keeps the host from launching what comes next.
    - `config`, `mask_id`, `level`: static.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.
    - `selection_bits`: static; the source of the draws that select rows.
    """

    def step(carry: tuple[Array, Trace]) -> tuple[Array, Trace]:
        tokens, trace = carry
        asked = asked_rows(config, tokens, batch, mask_id, level)
        hidden, sources = hidden_of(tokens, asked)
        choice = evaluate(
            params, config, hidden, sources, asked, batch, trace.steps, chunks=logits_chunks, level=level
        )
        return transfer(tokens, trace, batch, asked, choice, selection_bits, level)

    first = jnp.asarray(batch.tokens), empty_trace(batch, level)
    if max_steps is None:
        return step(first)[1]

    def unfinished(carry: tuple[Array, Trace]) -> Bool[Array, ""]:
        tokens, trace = carry
        masked = masked_rows(tokens, batch, mask_id)
        return (trace.steps < max_steps) & may_step(masked, batch, trace.steps, trace.post_left)

    return lax.while_loop(unfinished, step, first)[1]


def step_behind[Pool](
    forward: Callable[[RowInts, Wanted], tuple[Hidden, Pool]],
    params: Params,
    batch: Batch,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    selection_bits: SelectionBits,
) -> tuple[Trace, Pool]:
    """One denoising step behind an evaluation that also stores.

    Arguments:
    - `forward`: takes all tokens, and the rows that are wanted; returns these, and what it has stored.
    - `params`, `batch`: stacked weights, and the packed batch.
    - `config`, `mask_id`, `level`: static.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.
    - `selection_bits`: static; the source of the draws that select rows.

    Returns the trace of one step, and what `forward` has stored.
    """
    tokens = jnp.asarray(batch.tokens)
    asked = asked_rows(config, tokens, batch, mask_id, level)
    wanted, sources = wanted_of(asked)
    hidden, pool = forward(tokens, wanted)
    choice = evaluate(params, config, hidden, sources, asked, batch, 0, chunks=logits_chunks, level=level)
    trace = transfer(tokens, empty_trace(batch, level), batch, asked, choice, selection_bits, level)[1]
    return trace, pool


def asked_rows(
    config: ModelConfig, tokens: Int[Array, " rows"], batch: Batch, mask_id: int, level: Level
) -> AskedRows:
    """The rows to evaluate: only masked rows meet the head, and those that may be edited. `transfer` takes
    what it finds so."""
    masked = masked_rows(tokens, batch, mask_id)
    evaluated, lowered = masked, None
    if batch.editing is not None:
        evaluated |= editable(batch.editing, masked, batch.head.segment)
        lowered = lowered_of(batch.editing, tokens, batch.head.segment)
    order, place = _in_front(evaluated)
    plain = evaluated
    if level >= Level.FILTERED:
        segment = jnp.minimum(batch.head.segment, batch.segments.step.shape[0] - 1)
        plain = evaluated & ~apart(batch.segments, config)[segment]
        if batch.editing is not None:
            plain &= ~(jnp.asarray(batch.editing.penalty) > 0)[segment]
        order = jnp.argsort(jnp.where(plain, 0, jnp.where(evaluated, 1, 2)), stable=True)
        place = jnp.argsort(order)
    rows = jax.tree.map(lambda x: jnp.asarray(x)[order], batch.head)
    positions = jnp.asarray(batch.rows.positions)[rows.row]
    sources, lowered = source_rows(config, rows, positions), jax.tree.map(lambda x: x[order], lowered)
    return AskedRows(masked, evaluated, place, plain.sum(), rows, positions, sources, lowered)


def apart(segments: SegmentParams, config: ModelConfig) -> Bool[Array, " segments"]:
    """Which segments control logits, draw from filtered distributions, or have their likeliest ids listed."""
    top_k, top_p, min_p = (jnp.asarray(x) for x in (segments.top_k, segments.top_p, segments.min_p))
    found = (top_k < config.vocab_size) | (top_p <= 1) | (min_p > 0) | segments.listed
    return found if segments.control is None else found | segments.control.controlled


def wanted_of(asked: AskedRows) -> tuple[Wanted, Sources]:
    """The rows that predict what is asked for, unguided copies last, and where they are among these."""
    place = jnp.arange(len(asked.masked))
    copied = (asked.sources.guided != asked.sources.unguided) & (place < asked.count)
    order, copies = _in_front(copied)
    before = asked.count
    own = jnp.where(place < before, asked.sources.guided, asked.sources.unguided[order][place - before])
    live = place < before + copied.sum()
    # Without the barrier XLA counts copies anew for each number of each hidden row that is gathered by them.
    copies = lax.optimization_barrier(jnp.where(copied, before + copies, place))
    return Wanted(own, live), Sources(place, copies)


def _in_front(flags: Bool[Array, " n"]) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """The order in which those that are flagged come first, and the place of each in it."""
    before = jnp.cumsum(flags) - flags
    place = jnp.where(flags, before, flags.sum() + jnp.arange(len(flags)) - before)
    return jnp.argsort(~flags, stable=True), place


def evaluate(
    params: Params,
    config: ModelConfig,
    hidden: Hidden,
    sources: Sources,
    asked: AskedRows,
    batch: Batch,
    steps: Int[Array, ""] | int,
    *,
    chunks: int,
    level: Level,
) -> Choice:
    """What the head makes of the hidden rows, `steps` steps into a dispatch, in the order of `asked`.

    Arguments:
    - `sources`: which of `hidden` predict the rows of `asked`.
    """
    return choose(
        params,
        config,
        hidden,
        sources,
        asked.rows,
        asked.positions,
        batch.segments,
        jnp.asarray(batch.segments.step) + steps,
        asked.count,
        asked.plain,
        lowered=asked.lowered,
        chunks=chunks,
        level=level,
    )


def masked_rows(tokens: Int[Array, " rows"], batch: Batch, mask_id: int) -> Bool[Array, " head"]:
    """Which head rows are still masked; padding is not."""
    return (tokens[batch.head.row] == mask_id) & (batch.head.segment < batch.segments.quota.shape[0])


def may_step(
    masked: Bool[Array, " head"],
    batch: Batch,
    steps: Int[Array, ""] | int,
    post_left: Int[Array, " segments"] | None = None,
) -> Bool[Array, ""]:
    """Whether no segment has finished its block after `steps` steps of this dispatch.

    Arguments:
    - `masked`: which head rows are masked.
    - `post_left`: as `Trace` has it.
    """
    segments = batch.segments
    left = _count(masked, batch.head, segments.quota.shape[0]) > 0
    if post_left is not None:
        left |= post_left > 0
    return jnp.all((left & (steps < segments.steps_left)) | ~(segments.steps_left > 0))


def empty_trace(batch: Batch, level: Level) -> Trace:
    """The trace before the first step."""
    shape = (batch.segments.quota.shape[1], batch.head.row.shape[0])
    likeliest = None if level < Level.FILTERED else Likeliest.nothing(shape[1])
    return Trace(
        jnp.int32(0),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, bool),
        jnp.zeros(shape),
        likeliest,
        jax.tree.map(jnp.asarray, batch.states),
        None if batch.editing is None else jnp.asarray(batch.editing.post_left),
    )


def transfer(
    tokens: Int[Array, " rows"],
    trace: Trace,
    batch: Batch,
    asked: AskedRows,
    choice: Choice,
    selection_bits: SelectionBits,
    level: Level,
) -> tuple[Int[Array, " rows"], Trace]:
    """Let each segment's rule commit some choices; the end of a step.

    Arguments:
    - `tokens`, `trace`: before the step.
    - `asked`, `choice`: the rows of the head, and its choices in the same order.

    Returns tokens and trace after the step.
    """
    head, segments, index = batch.head, batch.segments, trace.steps
    masked = asked.masked
    # A kernel leaves undefined what nobody asked for.
    choice = jax.tree.map(lambda x: where_rows(asked.evaluated, x[asked.place], 0), choice)
    positions = jnp.asarray(batch.rows.positions)[head.row]
    now = jnp.asarray(segments.step) + index
    bits = selection_bits(jnp.asarray(segments.seed), now, jnp.asarray(head.segment), positions)
    candidates = _candidates(choice, masked, head, segments, bits)
    counts = _count(masked, head, segments.quota.shape[0])
    params = _rule_params(segments, index, counts)
    long_rules = level >= Level.FILTERED
    commit, states = select(candidates, segments.rule, params, trace.states, long_rules=long_rules)
    post_left = trace.post_left
    if batch.editing is not None and post_left is not None:
        before = tokens[head.row], choice.token, choice.logprob
        edited = replaced(batch.editing, asked.evaluated & ~masked, head.segment, *before)
        post_left = post_left_after(post_left, counts, _count(edited, head, len(post_left)))
        commit |= edited
    tokens = _commit(tokens, head, commit, choice.token)
    return tokens, Trace(
        index + 1,
        trace.tokens.at[index].set(choice.token),
        trace.committed.at[index].set(commit),
        trace.logprobs.at[index].set(choice.logprob),
        jax.tree.map(lambda old, new: where_rows(commit, new, old), trace.likeliest, choice.likeliest),
        states,
        post_left,
    )


def _count(masked: Bool[Array, " head"], head: HeadRows, segments: int) -> Int[Array, " segments"]:
    own = jnp.asarray(head.segment)[:, None] == jnp.arange(segments)
    return (own & masked[:, None]).sum(axis=0, dtype=jnp.int32)


def _candidates(
    choice: Choice, masked: Array, head: HeadRows, segments: SegmentParams, bits: Array
) -> Candidates:
    """The head rows as the transfer rules see them; a drawn order is the Gumbel form of a draw without
    replacement from softmax(confidence / order_temperature)."""
    temperature = jnp.asarray(segments.order_temperature)[head.segment]
    drawn = choice.confidence / jnp.where(temperature > 0, temperature, 1) + gumbel(bits)
    order = jnp.where(temperature > 0, drawn, choice.confidence)
    return Candidates(masked, head.segment, choice.confidence, order, uniform(bits))


def _rule_params(segments: SegmentParams, index: Array, masked: Int[Array, " segments"]) -> RuleParams:
    fraction = jnp.asarray(segments.fraction)[:, index]
    quota = jnp.asarray(segments.quota)[:, index] + jnp.where(segments.plus_masked, masked, 0)
    by_fraction = (_pooled(masked, jnp.asarray(segments.pooled)) * fraction).astype(jnp.int32)
    return RuleParams(
        quota=jnp.where(segments.by_fraction, by_fraction, quota),
        fraction=fraction,
        options=segments.options,
    )


def _pooled(masked: Int[Array, " segments"], pooled: Bool[Array, " segments"]) -> Float[Array, " segments"]:
    """Masked rows of each segment, or their mean over the pooled segments for those."""
    mean = jnp.where(pooled, masked, 0).sum() / jnp.maximum(pooled.sum(), 1).astype(jnp.float32)
    return jnp.where(pooled, mean, masked.astype(jnp.float32))


def _commit(
    tokens: Int[Array, " rows"], head: HeadRows, commit: Bool[Array, " head"], choice: Int[Array, " head"]
) -> Int[Array, " rows"]:
    """Write the committed tokens into the rows and into their unguided copies."""
    rows = jnp.where(commit, jnp.stack([head.row, head.unguided]), tokens.shape[0])
    return tokens.at[rows].set(choice, mode="drop")
