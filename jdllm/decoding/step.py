"""The denoising step, and the device loop over the steps of a dispatch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.decoding.batch import Batch, HeadRows, SegmentParams, Trace
from jdllm.decoding.head import Choice, choose
from jdllm.decoding.noise import Purpose, gumbel, position_bits, step_keys, uniform
from jdllm.decoding.transfer import Candidates, RuleParams, select
from jdllm.models.block import Hidden
from jdllm.models.config import ModelConfig
from jdllm.models.transformer import forward
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.planning.chunks import ChunkConfig

SelectionBits = Callable[[Array, Array, Array, Array], Array]
"""(seed [segments, 2], step [segments], segment [rows], position [rows]) -> uint32 [rows]."""


def keyed_bits(seed: Array, step: Array, segment: Array, positions: Array) -> Array:
    """Random bits for the draws that select rows, keyed as `jdllm.decoding.noise` describes."""
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
    - `max_steps`: int32, at most the columns of the segments' step tables. Tokens do not depend on it.
    - `config`, `mask_id`, `chunks`, `level`: static.
    - `selection_bits`: static; where the draws that select rows come from.

    Returns the trace. Exact: the steps are those of the official LLaDA and Dream samplers.
    """

    return run_steps(
        lambda tokens: forward(params, config, tokens, batch.rows, chunks=chunks),
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
    hidden_of: Callable[[Int[Array, " rows"]], Hidden],
    params: Params,
    batch: Batch,
    max_steps: Int[Array, ""],
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    selection_bits: SelectionBits,
) -> Trace:
    """The device loop of `denoise`, for any way to the hidden rows.

    Arguments:
    - `hidden_of`: from the tokens of the packed rows to their hidden rows after the last layer.
    - the others: as of `denoise`.
    """

    def unfinished(carry: tuple[Array, Trace]) -> Bool[Array, ""]:
        tokens, trace = carry
        masked = masked_rows(tokens, batch, mask_id)
        return (trace.steps < max_steps) & may_step(masked, batch, trace.steps)

    def step(carry: tuple[Array, Trace]) -> tuple[Array, Trace]:
        tokens, trace = carry
        hidden = hidden_of(tokens)
        masked, order, choice = evaluate(
            params,
            config,
            hidden,
            tokens,
            batch,
            trace.steps,
            mask_id=mask_id,
            chunks=logits_chunks,
            level=level,
        )
        return transfer(tokens, trace, batch, masked, order, choice, selection_bits, level)

    return lax.while_loop(unfinished, step, (jnp.asarray(batch.tokens), empty_trace(batch)))[1]


def evaluate(
    params: Params,
    config: ModelConfig,
    hidden: Hidden,
    tokens: Int[Array, " rows"],
    batch: Batch,
    steps: Int[Array, ""] | int,
    *,
    mask_id: int,
    chunks: int,
    level: Level,
) -> tuple[Bool[Array, " head"], Int[Array, " head"], Choice]:
    """What the head makes of the hidden rows, `steps` steps into a dispatch.

    Returns what `transfer` takes: which head rows are masked, an order, and the choices in that order.
    """
    masked = masked_rows(tokens, batch, mask_id)
    order, rows, positions = masked_first(masked, batch)
    now = jnp.asarray(batch.segments.step) + steps
    choice = choose(
        params,
        config,
        hidden,
        rows,
        positions,
        batch.segments,
        now,
        masked.sum(),
        chunks=chunks,
        level=level,
    )
    return masked, order, choice


def masked_rows(tokens: Int[Array, " rows"], batch: Batch, mask_id: int) -> Bool[Array, " head"]:
    """Which head rows are still masked; padding is not."""
    return (tokens[batch.head.row] == mask_id) & (batch.head.segment < batch.segments.quota.shape[0])


def may_step(masked: Bool[Array, " head"], batch: Batch, steps: Int[Array, ""] | int) -> Bool[Array, ""]:
    """Whether no segment has finished its block after `steps` steps of this dispatch."""
    segments = batch.segments
    left = _count(masked, batch.head, segments.quota.shape[0]) > 0
    return jnp.all((left & (steps < segments.steps_left)) | ~(segments.steps_left > 0))


def masked_first(
    masked: Bool[Array, " head"], batch: Batch
) -> tuple[Int[Array, " head"], HeadRows, Int[Array, " head"]]:
    """An order of the head rows that begins with the masked ones, and the rows and their positions in it.

    Only masked rows meet the head; `transfer` takes what it finds in this order.
    """
    order = jnp.argsort(~masked, stable=True)
    rows = jax.tree.map(lambda x: jnp.asarray(x)[order], batch.head)
    return order, rows, jnp.asarray(batch.rows.positions)[rows.row]


def empty_trace(batch: Batch) -> Trace:
    """The trace before the first step."""
    shape = (batch.segments.quota.shape[1], batch.head.row.shape[0])
    return Trace(jnp.int32(0), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))


def transfer(
    tokens: Int[Array, " rows"],
    trace: Trace,
    batch: Batch,
    masked: Bool[Array, " head"],
    order: Int[Array, " head"],
    choice: Choice,
    selection_bits: SelectionBits,
    level: Level,
) -> tuple[Int[Array, " rows"], Trace]:
    """Let each segment's rule commit some choices; the end of a step.

    Arguments:
    - `tokens`, `trace`: before the step.
    - `masked`: head rows that may commit.
    - `order`, `choice`: an order of the head rows, and what the head chose in that order.

    Returns tokens and trace after the step.
    """
    head, segments, index = batch.head, batch.segments, trace.steps
    choice = jax.tree.map(lambda x: jnp.zeros_like(x).at[order].set(x), choice)
    positions = jnp.asarray(batch.rows.positions)[head.row]
    now = jnp.asarray(segments.step) + index
    bits = selection_bits(jnp.asarray(segments.seed), now, jnp.asarray(head.segment), positions)
    candidates = _candidates(choice, masked, head, segments, bits)
    counts = _count(masked, head, segments.quota.shape[0])
    params = _rule_params(segments, index, counts)
    commit = select(candidates, segments.rule, params, entropies=level >= Level.MOMENTS)
    tokens = _commit(tokens, head, commit, choice.token)
    return tokens, Trace(
        index + 1, trace.tokens.at[index].set(choice.token), trace.committed.at[index].set(commit)
    )


def _count(masked: Bool[Array, " head"], head: HeadRows, segments: int) -> Int[Array, " segments"]:
    counts = jnp.zeros(segments + 1, jnp.int32).at[head.segment].add(masked.astype(jnp.int32))
    return counts[:segments]


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
        threshold=segments.threshold,
        strict=segments.strict,
        factor=segments.factor,
        open_end=segments.open_end,
        entropy_bound=segments.entropy_bound,
    )


def _pooled(masked: Int[Array, " segments"], pooled: Bool[Array, " segments"]) -> Float[Array, " segments"]:
    """Masked rows of each segment, or their mean over the pooled segments for those."""
    mean = jnp.where(pooled, masked, 0).sum() / jnp.maximum(pooled.sum(), 1).astype(jnp.float32)
    return jnp.where(pooled, mean, masked.astype(jnp.float32))


def _commit(
    tokens: Int[Array, " rows"], head: HeadRows, commit: Bool[Array, " head"], choice: Int[Array, " head"]
) -> Int[Array, " rows"]:
    """Write the committed tokens into the rows and into their unguided copies."""
    nowhere = tokens.shape[0]
    for rows in (head.row, head.unguided):
        tokens = tokens.at[jnp.where(commit, rows, nowhere)].set(choice, mode="drop")
    return tokens
