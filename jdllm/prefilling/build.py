"""The fifth stage: keys and values of the kept rows are computed once, and of each finished block."""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.step import asked_rows, empty_trace, evaluate, keyed_bits, transfer, wanted_of
from jdllm.execution.paged.parts import PackedParts, Storage, forward_parts
from jdllm.execution.paged.pool import KvArrays
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.split_attention import PageTable
from jdllm.prefilling.layout import Ints, Layout
from jdllm.prefilling.segments import Segment, ends, joined


class Stored(NamedTuple):
    """A part that an evaluation stores.

    - `part`: its number in the layout.
    - `source`: the rows of the evaluation that it takes, by layer and head where these differ.
    - `positions`: the positions that its keys get.
    """

    part: int
    source: Int[np.ndarray, "#layers #kv_heads rows"]
    positions: Ints


class Evaluation(NamedTuple):
    """One forward evaluation of the model.

    - `rows`: of one or more segments.
    - `reads`: parts that all rows see.
    - `stores`: parts that are stored.
    - `opens`: the block whose first step this is, if it is one; `head`: the row of each of its slots that may
      commit, in order.
    """

    rows: Segment
    reads: tuple[int, ...] = ()
    stores: tuple[Stored, ...] = ()
    opens: int | None = None
    head: tuple[int, ...] = ()


def building(layout: Layout, window: Ints, mask_id: int, *, shifted: bool) -> Iterator[Evaluation]:
    """The evaluations before the first block.

    Arguments:
    - `window`: rows behind each chunk while the chunk is encoded by itself, if it can see them.
    - `shifted`: whether the last row before a block predicts its first token, which is then committed before
      the block's own steps.
    """
    if layout.prefilling.build in ("full_mask", "full_query"):
        yield _whole(layout, mask_id, shifted)
    else:
        yield _apart(layout, window)
        rows = np.arange(len(layout.query))
        segment = Segment.of(layout.query, np.full(len(rows), len(rows)), layout.query_start + rows)
        stored = _stored(layout.query_part, rows, segment.positions)
        query = Evaluation(segment, tuple(range(layout.query_part)), (stored,))
        yield _foretelling(query, layout, 0, mask_id) if shifted else query
    if layout.prefilling.build != "full_mask" and (layout.blocks > 1 or not shifted):
        yield _masks(layout, 0, mask_id, shifted)


def advancing(
    layout: Layout, block: int, tokens: Ints, mask_id: int, *, shifted: bool
) -> Iterator[Evaluation]:
    """The evaluations between two blocks.

    Arguments:
    - `block`: the one that begins.
    - `tokens`: int32, the tokens of the block before, which is finished.
    """
    slots = np.array(layout.block_slots(block - 1))
    segment = Segment.of(tokens, np.full(len(slots), len(slots)), _answer_positions(layout)[slots])
    part = layout.block_part(block - 1)
    others = tuple(i for i in range(len(layout.part_rows)) if i != part)
    finished = Evaluation(segment, others, (_stored(part, np.arange(len(slots)), segment.positions),))
    yield _foretelling(finished, layout, block, mask_id) if shifted else finished
    if block + 1 < layout.blocks or not shifted:
        yield _masks(layout, block, mask_id, shifted)


def _whole(layout: Layout, mask_id: int, shifted: bool) -> Evaluation:
    """Everything at once, and everything sees everything."""
    per_head = any(chunk.per_head for chunk in layout.chunks)
    start = layout.first_query_start if per_head else layout.query_start
    moved = layout.query_start - start
    masks = layout.gen_length if layout.prefilling.build == "full_mask" else 0
    tokens, positions = [layout.prefix], [np.arange(len(layout.prefix))]
    stores = [_stored(0, positions[0], positions[0])]
    at = len(layout.prefix)
    for place, chunk in enumerate(layout.chunks):
        kept = np.arange(len(chunk.tokens)) if chunk.per_head else chunk.kept
        tokens.append(chunk.tokens[kept])
        positions.append(layout.chunk_start(place) + kept)
        rows = at + (chunk.kept if chunk.per_head else np.arange(len(kept)))
        stores.append(_stored(place + 1, rows, layout.kept_positions(place)))
        at += len(kept)
    tokens += [layout.query, np.full(masks, mask_id)]
    positions.append(start + np.arange(len(layout.query) + masks))
    parts = [layout.query_part, *(layout.block_part(block) for block in range(layout.blocks if masks else 0))]
    for part in parts:
        rows = at + np.arange(layout.part_rows[part])
        stores.append(_stored(part, rows, np.concatenate(positions)[rows] + moved))
        at += len(rows)
    segment = Segment.of(np.concatenate(tokens), np.full(at, at), np.concatenate(positions))
    built = Evaluation(segment, stores=tuple(stores))
    if not masks:
        return _foretelling(built, layout, 0, mask_id) if shifted else built
    first = at - masks
    slots = 1 if shifted else len(layout.block_slots(0))
    return built._replace(opens=0, head=tuple(range(first, first + slots)))


def _apart(layout: Layout, window: Ints) -> Evaluation:
    """The instruction, and each chunk by itself, after the instruction or alone."""
    prefix, mask = layout.prefix, layout.prefilling.retention_mask
    behind = window if mask == "none" else window[:0]  # otherwise no row of a chunk sees it
    segments = [Segment.of(prefix, np.full(len(prefix), len(prefix)))]
    alone = layout.prefilling.build == "chunk_only"
    for place, chunk in enumerate(layout.chunks):
        positions = layout.chunk_start(place) + np.arange(len(chunk.tokens))
        if alone:
            segments.append(Segment.of(chunk.tokens, np.full(len(positions), len(positions)), positions))
            continue
        after = len(prefix) + layout.prefilling.chunk_length + np.arange(len(behind))
        end = ends(mask, len(prefix), len(chunk.tokens), len(behind))
        end[: len(prefix)] = len(prefix)
        positions = np.concatenate([np.arange(len(prefix)), positions, after])
        segments.append(Segment.of(np.concatenate([prefix, chunk.tokens, behind]), end, positions))
    rows, starts = joined(segments)
    stores = [_stored(0, np.arange(len(prefix)), np.arange(len(prefix)))]
    for place, (chunk, start) in enumerate(zip(layout.chunks, starts[1:].tolist(), strict=True)):
        first = start + (0 if alone else len(prefix))
        stores.append(_stored(place + 1, first + chunk.kept, layout.kept_positions(place)))
    return Evaluation(rows, stores=tuple(stores))


def _masks(layout: Layout, block: int, mask_id: int, shifted: bool) -> Evaluation:
    """All masks from a block on, behind the finished tokens."""
    slots = np.arange(layout.block_slots(block).start, layout.gen_length)
    segment = Segment.of(
        np.full(len(slots), mask_id), np.full(len(slots), len(slots)), _answer_positions(layout)[slots]
    )
    stores, at = [], 0
    for part in range(layout.block_part(block), len(layout.part_rows)):
        rows = at + np.arange(layout.part_rows[part])
        stores.append(_stored(part, rows, segment.positions[rows]))
        at += len(rows)
    masks = Evaluation(segment, tuple(range(layout.block_part(block))), tuple(stores))
    if shifted:
        return masks
    return masks._replace(opens=block, head=tuple(range(len(layout.block_slots(block)))))


def _foretelling(before: Evaluation, layout: Layout, block: int, mask_id: int) -> Evaluation:
    """An evaluation whose last row tells the first token of a block: for that a row is added that nobody
    sees."""
    rows, slot = before.rows, layout.block_slots(block).start
    added = Segment.of(np.array([mask_id]), np.zeros(1), _answer_positions(layout)[slot : slot + 1])
    both = Segment(*(np.concatenate(column) for column in zip(rows, added, strict=True)))
    return before._replace(rows=both, opens=block, head=(rows.size,))


def _answer_positions(layout: Layout) -> Ints:
    return layout.query_start + len(layout.query) + np.arange(layout.gen_length)


def _stored(part: int, rows: np.ndarray, positions: Ints) -> Stored:
    source = rows if rows.ndim > 1 else rows[None, None]
    return Stored(part, source.astype(np.int32), positions.astype(np.int32))


def build(
    params: Params,
    batch: Batch,
    table: PageTable | None,
    storage: Storage,
    pool: KvArrays,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
) -> tuple[Trace, KvArrays]:
    """One evaluation, whose rows are stored; where it opens a block, the first step of that block.

    Arguments:
    - `params`, `batch`: stacked weights, and the packed batch.
    - `table`: the pages that each tile of rows sees; `None` if no page is read.
    - `storage`: the rows to store.
    - `pool`: written in place; donate it.
    - `config`, `mask_id`, `level`: static.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.

    Returns the trace of one step, which commits nothing where there are no head rows, and the pool.
    """
    tokens = jnp.asarray(batch.tokens)
    asked = asked_rows(config, tokens, batch, mask_id, level)
    wanted, sources = wanted_of(asked)
    parts = PackedParts(tokens, batch.rows, None, table, storage, wanted)
    hidden, written = forward_parts(params, config, parts, pool)
    choice = evaluate(params, config, hidden, sources, asked, batch, 0, chunks=logits_chunks, level=level)
    trace = transfer(tokens, empty_trace(batch, level), batch, asked, choice, keyed_bits, level)[1]
    return trace, pool if written is None else written
