"""Generation from left to right: prompts in parts, then a device loop of one token a turn."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jdllm.arrays import Tensor
from jdllm.decoding.batch import Batch, HeadRows, SegmentParams, Trace
from jdllm.decoding.head import Choice, Sources, choose
from jdllm.decoding.penalty import Penalty
from jdllm.decoding.unseen import padded, taken
from jdllm.execution.few_rows.chain import chain_operands, chains_storing
from jdllm.execution.paged.decode import Window, chain_rows, forward_decode, forward_decode_chained
from jdllm.execution.paged.parts import PackedParts, Seen, Storage, forward_parts, seeing
from jdllm.execution.paged.place import Place
from jdllm.execution.paged.pool import PAGE_ROWS, SCRATCH_PAGE, KvArrays
from jdllm.execution.paged.stored_keys import StoredKeys
from jdllm.execution.transformer import Wanted
from jdllm.models.block import Hidden
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import window_start
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level, Likeliest
from jdllm.pallas.split_attention import PageTable
from jdllm.pallas.split_attention.types import request_of


class Sequences(NamedTuple):
    """Sequences whose last token is known and not evaluated, one each segment.

    - `tokens`: that token.
    - `lengths`: how many tokens are known; 0 for padding.
    - `stop_ids`: ids after which nothing is committed; -1 stands for none.
    - `segments`: what each asks of the sampler. Plain ones come first: no filter, not listed.
    - `plain`: how many these are.
    - `left`: the last tokens that a part before leaves on the device, -1 where a sequence has ended.
    - `source`: for each segment the index of its token in `left`; -1 where the host knows the token.
    """

    tokens: Int[Tensor, " segments"]
    lengths: Int[Tensor, " segments"]
    stop_ids: Int[Tensor, "segments stops"]
    segments: SegmentParams
    plain: Int[Tensor, ""]
    left: Int[Tensor, " left"]
    source: Int[Tensor, " segments"]


class Reads(NamedTuple):
    """The pages that sequences read and write while a dispatch runs.

    - `pages`: the pages of each sequence, all steps included. Behind them lies an entry of one fresh row,
      which has the sequence's number; it is read where a row is not stored before it is seen.
    - `first`: where the entries of each sequence begin; at the end, how many entries there are.
    - `before`: how many rows of its sequence lie before each entry's page.
    - `next`: of each sequence the pages from that of its last token on, as many as the steps may reach.
    """

    pages: Int[Tensor, " entries"]
    before: Int[Tensor, " entries"]
    first: Int[Tensor, " segments+1"]
    next: Int[Tensor, "segments reached"]


_Turn = tuple[Array, Array, Trace, Penalty | None, Array | None, KvArrays]
"""The last token of each sequence, which of them have ended, the trace, seen ids, the last ids of each
sequence where words are banned, and the pool."""


def prefill(
    params: Params,
    batch: Batch,
    storage: Storage,
    seen: Seen,
    plain: Int[Tensor, ""],
    penalty: Penalty | None,
    pool: KvArrays,
    *,
    config: ModelConfig,
    level: Level,
) -> tuple[Trace, KvArrays]:
    """Evaluate parts of prompts, store them, and choose the token after each that is whole.

    Arguments:
    - `batch`: the parts; the head rows are the last ones of prompts that end, plain ones first.
    - `storage`, `seen`: what the parts store, and which stored rows they see.
    - `pool`: keys and values of all requests.
    - `plain`: how many head rows have no control and no filter and are not listed.
    - `penalty`: of the ids that the prompts hold; `None` where no segment has one.
    - `config`: the model; static.
    - `level`: at least what the segments' controls, filters and lists need; static.

    Returns the trace of one step for the head rows, and the pool. Exact.
    """
    head = HeadRows(*(jnp.asarray(x) for x in batch.head))
    live = jnp.asarray(head.segment) < batch.segments.step.shape[0]
    wanted = Wanted(head.row, live)
    parts = seeing(PackedParts(batch.tokens, batch.rows, None, None, storage, wanted), seen)
    hidden, written = forward_parts(params, config, parts, pool)
    assert written is not None
    positions = jnp.asarray(batch.rows.positions)[head.row] + 1
    step = jnp.asarray(batch.segments.step)
    count = live.sum(), jnp.asarray(plain)
    choice = chosen(params, config, hidden, head, positions, batch.segments, step, count, penalty, level)
    trace = Trace(jnp.int32(1), *(x[None] for x in committing(choice, live)), likeliest=choice.likeliest)
    return trace, written


def decode(
    params: Params,
    sequences: Sequences,
    reads: Reads,
    penalty: Penalty | None,
    max_steps: Int[Array, ""],
    pool: KvArrays,
    *,
    config: ModelConfig,
    level: Level,
) -> tuple[tuple[Trace, Int[Array, " left"]], KvArrays]:
    """Generate up to `max_steps` tokens of each sequence, until all have ended.

    Arguments:
    - `reads`, `pool`: what is stored: all but the last token of each.
    - `penalty`: of the ids that are known; `None` where no segment has one.
    - `max_steps`: int32, at most the columns of the segments' step tables. Tokens do not depend on it.
    - `config`: the model; static.
    - `level`: at least what the segments' controls, filters and lists need; static.

    Returns the trace, of which step i holds the i-th token of each segment that had not ended, the last token
    of each segment as `Sequences.left` holds it, and the pool. Exact.
    """
    lengths, stop_ids = jnp.asarray(sequences.lengths), jnp.asarray(sequences.stop_ids)
    segments, size = sequences.segments, sequences.lengths.shape[0]
    row, control = jnp.arange(size, dtype=jnp.int32), segments.control
    head, left = HeadRows(row, row, row), jnp.asarray(segments.steps_left)
    capacity = segments.quota.shape[1]
    empty = jnp.zeros((capacity, size), jnp.int32)
    likeliest = None if level < Level.FILTERED else Likeliest.nothing(capacity, size)
    trace = Trace(jnp.int32(0), empty, empty.astype(bool), empty.astype(jnp.float32), likeliest)
    chained = decodes_in_chain(params, config, size)
    operands = chain_operands(params, config) if chained else None
    count = (lengths > 0).sum(), jnp.asarray(sequences.plain)
    owner = request_of(jnp.arange(len(reads.pages)), reads.first)  # a search in each turn would take its time

    def active(ended: Bool[Array, " segments"], step: Int[Array, ""]) -> Bool[Array, " segments"]:
        return (lengths > 0) & ~ended & (step < left)

    def unfinished(carry: _Turn) -> Bool[Array, ""]:
        _, ended, trace, *_ = carry
        return (trace.steps < max_steps) & active(ended, trace.steps).any()

    def turn(carry: _Turn) -> _Turn:
        tokens, ended, trace, penalty, recent, pool = carry
        step, goes_on = trace.steps, active(ended, trace.steps)
        positions = jnp.maximum(lengths - 1, 0) + step
        place = _place(reads, lengths, step, goes_on)
        if chained:
            table = _table(reads, owner, lengths, step, fresh=True)
            hidden, pool = forward_decode_chained(
                params, config, tokens, positions, pool, place, table, operands=operands
            )
            # Nor may what the head needs besides be computed between two layers.
            hidden, asked, known = lax.optimization_barrier((hidden, count, penalty))
        else:
            seen = _seen(config, reads, owner, lengths, step)
            hidden, pool = forward_decode(params, config, tokens, positions, pool, place, seen)
            asked, known = count, penalty
        now, asking = jnp.asarray(segments.step) + step, segments
        if control is not None and recent is not None:
            asking = segments._replace(control=control._replace(left=recent))
        choice = chosen(params, config, hidden, head, positions + 1, asking, now, asked, known, level)
        token, committed, logprob = committing(choice, goes_on)
        trace = Trace(
            step + 1,
            trace.tokens.at[step].set(token),
            trace.committed.at[step].set(committed),
            trace.logprobs.at[step].set(logprob),
            jax.tree.map(lambda all, new: all.at[step].set(new), trace.likeliest, choice.likeliest),
        )
        ended = ended | (token[:, None] == stop_ids).any(axis=1)
        penalty = None if penalty is None else penalty.with_tokens(token, committed)
        recent = None if recent is None else jnp.append(recent[:, 1:], token[:, None], axis=1)
        return token, ended, trace, penalty, recent, pool

    tokens = taken(sequences.tokens, sequences.left, sequences.source)
    recent = None if control is None or control.left is None else jnp.asarray(control.left)
    carry = jnp.maximum(tokens, 0), tokens < 0, trace, penalty, recent, pool
    tokens, ended, trace, *_, pool = lax.while_loop(unfinished, turn, carry)
    return (trace, padded(jnp.where(ended, -1, tokens), len(sequences.left))), pool


def decodes_in_chain(params: Params, config: ModelConfig, segments: int) -> bool:
    """Whether `decode` runs its layers as a chain of kernels for so many segments."""
    return config.sliding_window is None and chains_storing(params, config, chain_rows(segments))


def chosen(
    params: Params,
    config: ModelConfig,
    hidden: Hidden,
    head: HeadRows,
    positions: Int[Array, " head"],
    segments: SegmentParams,
    step: Int[Array, " segments"],
    count: tuple[Int[Array, ""], Int[Array, ""]],
    penalty: Penalty | None,
    level: Level,
) -> Choice:
    """The tokens at `positions`, each from its row of `hidden`.

    Arguments:
    - `count`: how many there are, and how many of them, the first, are plain.
    """
    own = jnp.arange(hidden.shape[0], dtype=jnp.int32)
    sources = Sources(own, own)
    return choose(
        params,
        config,
        hidden,
        sources,
        head,
        positions,
        segments,
        step,
        *count,
        penalty,
        chunks=1,
        level=level,
    )


def committing(choice: Choice, live: Bool[Array, " head"]) -> tuple[Array, Array, Array]:
    """Token, whether it counts, and log-probability; a kernel leaves undefined what nobody asked for."""
    token, logprob = (jnp.where(live, x, 0) for x in (choice.token, choice.logprob))
    return token, live, logprob


def _place(
    reads: Reads, lengths: Int[Array, " segments"], step: Int[Array, ""], live: Bool[Array, " segments"]
) -> Place:
    """Where the last known token of each sequence is stored."""
    position = jnp.maximum(lengths - 1, 0)
    page = (position + step) // PAGE_ROWS - position // PAGE_ROWS
    held = jnp.take_along_axis(jnp.asarray(reads.next), page[:, None], axis=1, mode="clip")[:, 0]
    nowhere = jnp.iinfo(jnp.int32).max - jnp.arange(len(lengths), dtype=jnp.int32)
    return Place(jnp.where(live, held, nowhere), (position + step) % PAGE_ROWS)


def _seen(
    config: ModelConfig,
    reads: Reads,
    owner: Int[Array, " entries"],
    lengths: Int[Array, " segments"],
    step: Int[Array, ""],
) -> PageTable | Window:
    """What each sequence sees once its last known token is stored."""
    pages, valid, first = table = _table(reads, owner, lengths, step, fresh=False)
    if config.sliding_window is None:
        return table
    length, before = jnp.where(lengths > 0, lengths + step, 0), jnp.asarray(reads.before)
    # Entries of a sequence follow one another: a position is as far from its row among them as the first is.
    begin = jnp.minimum(first[:-1], len(pages) - 1)
    end = first[:-1] * PAGE_ROWS + length - before[begin]
    start = window_start(config, end, first[:-1] * PAGE_ROWS)
    return Window(StoredKeys(pages, valid), jnp.where(length > 0, start, end), end)


def _table(
    reads: Reads,
    owner: Int[Array, " entries"],
    lengths: Int[Array, " segments"],
    step: Int[Array, ""],
    *,
    fresh: bool,
) -> PageTable:
    """The pages that each sequence sees.

    Arguments:
    - `owner`: the sequence of each entry.
    - `fresh`: the last known token of a sequence is no row of its pages, but fresh.
    """
    pages, before, first = (jnp.asarray(x) for x in reads[:3])
    entry = jnp.arange(len(pages))
    length = jnp.where(lengths > 0, lengths + step, 0)[owner]
    valid = jnp.clip(length - fresh - before, 0, PAGE_ROWS)
    valid = jnp.where(pages < 0, fresh & (length > 0), valid)
    pages = pages if fresh else jnp.maximum(pages, SCRATCH_PAGE)
    return PageTable(pages, jnp.where(entry < first[-1], valid, 0), first)
