"""Self-speculation: a model drafts a block that sees itself both ways, and verifies it as a causal model.

What is accepted is what the model generates one token after another, whatever the draft is. Source:
linear_spec_generate of modeling_nemotron_labs_diffusion.py, at temperature 0.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jdllm.arrays import Tensor
from jdllm.decoding.batch import Batch, SegmentParams, Trace
from jdllm.decoding.causal import committing
from jdllm.decoding.head import Sources, choose
from jdllm.decoding.step import asked_rows, empty_trace, evaluate, keyed_bits, masked_rows, transfer
from jdllm.execution.paged.forward import forward_reuse
from jdllm.execution.paged.parts import PackedParts, Storage, forward_parts
from jdllm.execution.paged.pool import PAGE_ROWS, KvArrays
from jdllm.execution.transformer import Wanted
from jdllm.models.adapter import DraftAdapter, with_adapter
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.split_attention import PageTable

MOST_FORWARDS = PAGE_ROWS
"""Evaluations that draft a block, at most: each fills a mask of a block that has no more rows."""


def speculate(
    params: Params,
    adapter: DraftAdapter | None,
    batch: Batch,
    storage: Storage,
    stored: PageTable,
    seen: PageTable,
    plain: Int[Tensor, ""],
    pool: KvArrays,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
) -> tuple[tuple[Trace, Int[Array, " segments"]], KvArrays]:
    """Draft a block of each segment, verify and store it.

    Arguments:
    - `params`: stacked weights.
    - `adapter`: with which the model drafts, `None` for the model alone. It verifies without an adapter.
    - `batch`: the blocks: a known token each, and masks. The ranges of its rows are those of a causal model,
      and its head rows are all rows, those of plain segments first.
    - `storage`: where all rows are stored.
    - `stored`, `seen`: the pages that each tile of rows sees, without and with the rows of its own block.
      Where `masks_verify`, `stored` has as many tiles again for these.
    - `plain`: how many head rows have no control and no filter and are not listed.
    - `pool`: keys and values of all requests, written in place: donate it.
    - `config`, `mask_id`: the model; static.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.
    - `level`: at least what the segments' rules, controls, filters and lists need; static.

    Returns the trace of one step, with for each head row the token behind it, which counts where all rows
    before hold what the model generates; then the evaluations that drafted for each segment; and the pool.
    Rows behind those that count are stored too, and mean nothing. Exact.
    """
    drafting = with_adapter(params, config, adapter)
    tokens, forwards = _draft(
        drafting, batch, seen, pool, config=config, mask_id=mask_id, logits_chunks=logits_chunks, level=level
    )
    head = batch.head
    live = jnp.asarray(head.segment) < batch.segments.step.shape[0]
    wanted = Wanted(jnp.asarray(head.row), live)
    parts = PackedParts(tokens, batch.rows, None, stored, storage, wanted)
    if masks_verify(config):
        parts = _with_masks(parts, mask_id)
    hidden, written = forward_parts(params, config, parts, pool)
    assert written is not None
    own = jnp.arange(hidden.shape[0], dtype=jnp.int32)
    choice = choose(
        params,
        config,
        hidden,
        Sources(own, own),
        head,
        jnp.asarray(batch.rows.positions)[head.row] + 1,
        batch.segments,
        jnp.asarray(batch.segments.step),
        live.sum(),
        jnp.asarray(plain),
        chunks=logits_chunks,
        level=level,
    )
    token, _, logprob = committing(choice, live)
    follows = tokens[jnp.minimum(jnp.asarray(head.row) + 1, len(tokens) - 1)]
    counts = live & up_to_the_first(token != follows, jnp.asarray(head.segment))
    trace = Trace(jnp.int32(1), token[None], counts[None], logprob[None], choice.likeliest)
    return (trace, forwards), written


def masks_verify(config: ModelConfig) -> bool:
    """Whether masks verify a draft: rows of the draft predict themselves, and not the tokens behind them."""
    return not (config.causal_context or config.logits_shift)


def _with_masks(parts: PackedParts, mask_id: int) -> PackedParts:
    """Verification by a model whose rows predict themselves: behind the rows of drafts as many masks.

    The mask of a row takes the next position, and sees itself and what the row sees, as in blocks of one row.

    Arguments:
    - `parts`: the rows of drafts, of which hidden rows are wanted; the masks' are wanted in their place.
    """
    tokens, rows, wanted = jnp.asarray(parts.tokens), parts.rows, parts.wanted
    count = len(tokens)
    own = jnp.arange(2 * count) >= count
    positions = jnp.concatenate([jnp.asarray(rows.positions), jnp.asarray(rows.positions) + 1])
    ranges = (jnp.tile(jnp.asarray(x), 2) for x in (rows.k_start, rows.k_end))
    return parts._replace(
        tokens=jnp.where(own, mask_id, jnp.tile(tokens, 2)),
        rows=Rows(positions, *ranges),
        own=own,
        wanted=Wanted(jnp.asarray(wanted.rows) + count, wanted.live),
    )


def _draft(
    params: Params,
    batch: Batch,
    seen: PageTable,
    pool: KvArrays,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
) -> tuple[Int[Array, " rows"], Int[Array, " segments"]]:
    """The tokens of blocks whose masks are filled by the segments' rules, and how many evaluations each took.

    Arguments:
    - `params`: with the adapter; all others are those of `speculate`.
    """
    batch = batch._replace(segments=_without_masks(batch.segments, mask_id))
    size = batch.segments.step.shape[0]

    def unfinished(carry: tuple[Array, Array, Array, Trace]) -> Bool[Array, ""]:
        tokens, _, turns, _ = carry
        return (turns < MOST_FORWARDS) & masked_rows(tokens, batch, mask_id).any()

    def fill(carry: tuple[Array, Array, Array, Trace]) -> tuple[Array, Array, Array, Trace]:
        tokens, forwards, turns, trace = carry
        asked = asked_rows(config, tokens, batch, mask_id, level)
        hidden = forward_reuse(params, config, tokens, batch.rows, pool, seen)
        choice = evaluate(
            params, config, hidden, asked.sources, asked, batch, 0, chunks=logits_chunks, level=level
        )
        tokens, after = transfer(tokens, trace, batch, asked, choice, keyed_bits, level)
        filled = jnp.zeros(size, bool).at[batch.head.segment].max(asked.masked, mode="drop")
        return tokens, forwards + filled, turns + 1, trace._replace(states=after.states)

    first = jnp.asarray(batch.tokens), jnp.zeros(size, jnp.int32), jnp.int32(0), empty_trace(batch, level)
    tokens, forwards, _, _ = lax.while_loop(unfinished, fill, first)
    return tokens, forwards


def _without_masks(segments: SegmentParams, mask_id: int) -> SegmentParams:
    """Segments that never choose a mask: a draft would not end."""
    banned, other = jnp.asarray(segments.token_bans).T
    other = jnp.where(banned == mask_id, other, banned)
    return segments._replace(token_bans=jnp.stack([jnp.full_like(other, mask_id), other], axis=1))


def up_to_the_first(flags: Bool[Array, " head"], segment: Int[Array, " head"]) -> Bool[Array, " head"]:
    """Which head rows come before the first of their segment that is flagged, that one included.

    Arguments:
    - `segment`: of each row; those of a segment follow one another.
    """
    before = jnp.cumsum(flags) - flags
    begins = jnp.concatenate([jnp.ones(1, bool), segment[1:] != segment[:-1]])
    return before == lax.cummax(jnp.where(begins, before, 0))
