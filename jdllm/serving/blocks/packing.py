"""Packs finished blocks that are to be stored into arrays of compiled sizes."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.batch import Batch
from jdllm.decoding.rules import evaluated_apart
from jdllm.execution.paged.parts import Seen, Storage
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.execution.paged.stored_keys import StoredKeys
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import seen_range
from jdllm.planning.ladder import Entry
from jdllm.serving.blocks.request import BlockRequest
from jdllm.serving.packing import head_rows, segment_params
from jdllm.serving.part_packing import Filled, storage_of
from jdllm.serving.pool.page_book import PageBook


class PackedBlocks(NamedTuple):
    """Finished blocks.

    - `tokens`: int32 ids.
    - `rows`: positions and key ranges.
    - `storage`: where all rows are stored.
    - `seen`: which stored rows they see.
    - `ends`: the row behind the last one of each request.
    """

    tokens: np.ndarray
    rows: Rows
    storage: Storage
    seen: Seen
    ends: np.ndarray

    @property
    def arguments(self) -> tuple[np.ndarray, Rows, Storage, Seen]:
        """What the device needs to store them."""
        return self.tokens, self.rows, self.storage, self.seen


class PackedChoices(NamedTuple):
    """Finished blocks of which some foretell the token behind them.

    - `batch`: the rows; head rows are the last ones of blocks that foretell a token, plain ones first.
    - `storage`, `seen`: as `PackedBlocks` has them.
    - `plain`: how many head rows have no control and no filter and are not listed.
    - `order`: which requests the head rows belong to.
    """

    batch: Batch
    storage: Storage
    seen: Seen
    plain: np.ndarray
    order: np.ndarray

    @property
    def arguments(self) -> tuple[Batch, Storage, Seen, np.ndarray, None]:
        """What the device needs; block models have no penalties."""
        return self.batch, self.storage, self.seen, self.plain, None


def part_of(request: BlockRequest, chunk: int) -> range:
    """The tokens of a request that its next part stores: up to `chunk`, whole pages, unless these are all."""
    return range(request.computed, min(request.storable, request.computed // PAGE_ROWS * PAGE_ROWS + chunk))


def pages_of(rows: int) -> int:
    """Pages that so many rows take."""
    return -(-rows // PAGE_ROWS)


class Form(NamedTuple):
    """How parts are laid out.

    - `tile_rows`: the rows of each request fill whole tiles of so many, which see its stored rows page by
      page. `None` where stored rows are gathered, for which they may be few, or each is seen by many.
    - `entries`: of the table of these pages, `None` where nothing is stored before any part.
    """

    tile_rows: int | None
    entries: int | None


def is_short(part: range) -> bool:
    """Whether a part is a block, or little more, behind stored rows."""
    return part.start > 0 and len(part) <= PAGE_ROWS


def tiles_of(part: range, tile_rows: int) -> int:
    """Tiles of so many rows that the rows of a part fill."""
    return -(-len(part) // tile_rows)


def pack_blocks(
    requests: Sequence[BlockRequest],
    parts: Sequence[range],
    config: ModelConfig,
    pool: PageBook,
    entry: Entry,
    form: Form,
) -> PackedBlocks:
    """Lay out a part of each request, one after another.

    Arguments:
    - `requests`: of which something is to be stored.
    - `parts`: the positions of each that are stored now: whole blocks.
    - `config`: the model.
    - `pool`: the pages of the requests.
    - `entry`: the sizes of the arrays.
    - `form`: how parts are laid out.
    """
    tokens, positions, k_start, k_end = (np.zeros(entry.rows, np.int32) for _ in range(4))
    unit = form.tile_rows or 1
    lengths = np.array([tiles_of(part, unit) * unit for part in parts])
    starts, filled = np.cumsum(lengths) - lengths, []
    seen, bases = _seen(requests, parts, pool, entry, form)
    bases = starts - [part.start for part in parts] if bases is None else bases
    for request, part, start, base in zip(requests, parts, starts, bases, strict=True):
        rows = slice(start, start + len(part))
        tokens[rows] = request.tokens[part.start : part.stop]
        positions[rows] = part
        causal = config.causal_context and request.foretold
        own = dataclasses.replace(config, block_length=request.seen_length, causal_context=causal)
        seen_by_each = seen_range(own, positions[rows], part.stop)
        assert seen_by_each is not None  # rows of a block model do not see everything
        first, end = seen_by_each
        k_start[rows] = base + (part.start if form.tile_rows else first)
        k_end[rows] = base + end
        pages = pool.pages_of(request.id)[part.start // PAGE_ROWS : pages_of(part.stop)]
        source = np.arange(start, start + len(part))[None, None]
        filled.append(Filled(pages, source, np.array(part, np.int32), part.start % PAGE_ROWS))
    storage = storage_of(filled, entry.rows, whole=False, parts=entry.segments)
    ends = starts + [len(part) for part in parts]
    return PackedBlocks(tokens, Rows(positions, k_start, k_end), storage, seen, ends)


def _seen(
    requests: Sequence[BlockRequest], parts: Sequence[range], pool: PageBook, entry: Entry, form: Form
) -> tuple[Seen, np.ndarray | None]:
    """The stored rows that parts see and, where ranges refer to them, where those of each request begin."""
    ids, (tile_rows, entries) = [request.id for request in requests], form
    if entries is None:
        return None, None
    if tile_rows is None:
        table = pool.page_table(ids, [part.stop for part in parts], entries)
        return StoredKeys(table.pages, table.valid), PAGE_ROWS * np.asarray(table.first)[:-1]
    owner = np.repeat(np.arange(len(parts)), [tiles_of(part, tile_rows) for part in parts]).tolist()
    table = pool.page_table([ids[i] for i in owner], [parts[i].start for i in owner], entries)
    first = np.asarray(table.first)
    return table._replace(first=padded(first, entry.rows // tile_rows + 1, int(first[-1]))), None


def foretells(request: BlockRequest, part: range) -> bool:
    """Whether the last row of a part gives the first token of the current block, which nothing else gives."""
    return request.foretold and part.stop == request.known and request.opens


def with_choices(
    packed: PackedBlocks,
    requests: Sequence[BlockRequest],
    parts: Sequence[range],
    config: ModelConfig,
    entry: Entry,
) -> PackedChoices:
    """Ask the head for the tokens behind parts that foretell one.

    Arguments:
    - `packed`: the parts, of the sizes of `entry`.
    - `requests`, `parts`: as `pack_blocks` takes them.
    - `config`: the model.
    - `entry`: the sizes of the arrays.
    """
    chosen = [i for i, each in enumerate(zip(requests, parts, strict=True)) if foretells(*each)]
    apart = [evaluated_apart(request.sampling) for request in requests]
    order = np.array(sorted(chosen, key=lambda i: apart[i]), np.int64)
    row = packed.ends[order] - 1
    head = head_rows(row, row, order, entry)
    batch = Batch(packed.tokens, packed.rows, head, segment_params(requests, entry, config))
    plain = np.array(sum(not apart[i] for i in chosen), np.int32)
    return PackedChoices(batch, packed.storage, packed.seen, plain, order)
