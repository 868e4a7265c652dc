"""Packs blocks that are drafted and verified into arrays of compiled sizes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.batch import Batch
from jdllm.decoding.rules import evaluated_apart, initial_states
from jdllm.decoding.speculation import masks_verify
from jdllm.execution.paged.parts import Storage
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.pallas.split_attention import PageTable, with_fresh_rows
from jdllm.planning.ladder import TILE_ROWS, Entry
from jdllm.serving.blocks.request import BlockRequest
from jdllm.serving.packing import head_rows, segment_params
from jdllm.serving.part_packing import Filled, storage_of
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.speculation.request import SpeculativeRequest


class PackedDrafts(NamedTuple):
    """Blocks of which the first token is known, and the others are masks.

    - `batch`: the blocks; the head rows are all their rows, those of plain requests first.
    - `storage`: where all rows are stored.
    - `stored`, `seen`: what each tile sees, without and with the rows of its own block; of the former twice
      as many where `masks_verify`, as `speculate` has it.
    - `plain`: how many head rows have no control and no filter and are not listed.
    - `order`: which requests the segments belong to.
    """

    batch: Batch
    storage: Storage
    stored: PageTable
    seen: PageTable
    plain: np.ndarray
    order: list[int]

    @property
    def arguments(self) -> tuple[Batch, Storage, PageTable, PageTable, np.ndarray]:
        """What the device needs."""
        return self.batch, self.storage, self.stored, self.seen, self.plain


class DraftNeeds(NamedTuple):
    """Packed rows, head rows, and entries of the page table."""

    rows: int
    head_rows: int
    entries: int


def block_of(request: SpeculativeRequest) -> range:
    """The positions of the block that is drafted next; it begins with the last known token."""
    return range(request.known - 1, request.known - 1 + request.block_length)


def draft_needs(request: SpeculativeRequest, config: ModelConfig) -> DraftNeeds:
    """What the next block of a request takes."""
    tiles, pages = _tiles(request), copies_of(config) * -(-request.computed // PAGE_ROWS)
    return DraftNeeds(tiles * TILE_ROWS, request.block_length, tiles * (pages + 1))


def copies_of(config: ModelConfig) -> int:
    """How often a tile reads what is stored where it verifies: once more where masks verify."""
    return 2 if masks_verify(config) else 1


def pack_drafts(
    requests: Sequence[SpeculativeRequest],
    config: ModelConfig,
    mask_id: int,
    pool: PageBook,
    entry: Entry,
    entries: int,
) -> PackedDrafts:
    """Lay out the next block of each request in whole tiles.

    Arguments:
    - `requests`: of which all but the last known token is stored.
    - `config`, `mask_id`: the model.
    - `pool`: the pages of the requests.
    - `entry`: the sizes of the arrays.
    - `entries`: of the page tables.
    """
    apart = [evaluated_apart(request.sampling) for request in requests]
    order = sorted(range(len(requests)), key=lambda i: apart[i])
    ordered = [requests[i] for i in order]
    tiles_of = [_tiles(request) for request in ordered]
    starts = np.cumsum([0, *tiles_of[:-1]]) * TILE_ROWS
    tokens, positions, k_start, k_end = (np.zeros(entry.rows, np.int32) for _ in range(4))
    row, filled = [], []
    for request, start in zip(ordered, starts, strict=True):
        block = block_of(request)
        rows = np.arange(start, start + len(block))
        tokens[rows], tokens[start] = mask_id, request.tokens[block.start]
        positions[rows] = block
        k_start[rows], k_end[rows] = start, rows + 1
        pages = pool.pages_of(request.id)[block.start // PAGE_ROWS : -(-block.stop // PAGE_ROWS)]
        filled.append(Filled(pages, rows[None, None], positions[rows], block.start % PAGE_ROWS))
        row.append(rows)
    at = np.concatenate(row)
    segment = np.repeat(np.arange(len(ordered)), [request.block_length for request in ordered])
    batch = Batch(
        tokens,
        Rows(positions, k_start, k_end),
        head_rows(at, at, segment, entry),
        segment_params(ordered, entry, config),
        initial_states(entry.head_rows, entry.segments),
    )
    plain = sum(r.block_length for r in ordered if not evaluated_apart(r.sampling))
    live = [block_of(request).start for request in ordered]
    of_each = [Tiled(*each) for each in zip(ordered, live, tiles_of, starts.tolist(), strict=True)]
    stored, seen = tables_of(of_each, pool, entry.rows // TILE_ROWS, entries, copies_of(config))
    storage = storage_of(filled, entry.rows, whole=False, parts=entry.segments)
    return PackedDrafts(batch, storage, stored, seen, np.array(plain, np.int32), order)


class Tiled(NamedTuple):
    """A block in tiles of its own.

    - `request`: whose block it is.
    - `stored`: how many rows of the request are stored.
    - `tiles`, `start`: how many tiles it fills, and the packed row with which it begins.
    """

    request: SpeculativeRequest | BlockRequest
    stored: int
    tiles: int
    start: int


def tables_of(
    blocks: Sequence[Tiled], pool: PageBook, tiles: int, entries: int, copies: int
) -> tuple[PageTable, PageTable]:
    """What each tile sees of what is stored, and that together with the rows of its block.

    Arguments:
    - `blocks`: one after another.
    - `pool`: the pages of the requests.
    - `tiles`: of the batch.
    - `entries`: of the page tables.
    - `copies`: of the tiles in the first of these tables.
    """
    of_tile = [block for block in blocks for _ in range(block.tiles)]
    live = [block.stored for block in of_tile]
    used = sum(-(-rows // PAGE_ROWS) for rows in live)
    table = pool.page_table([block.request.id for block in of_tile], live, used)
    first = np.asarray(table.first)
    table = table._replace(first=padded(first, tiles + 1, int(first[-1])))
    begins = padded(np.array([block.start for block in of_tile]), tiles)
    counts = padded(np.array([block.request.block_length for block in of_tile]), tiles)
    both = _repeated(table, copies), with_fresh_rows(table, begins, counts, PAGE_ROWS)
    stored, seen = (
        one._replace(
            pages=padded(np.asarray(one.pages), entries), valid=padded(np.asarray(one.valid), entries)
        )
        for one in both
    )
    return stored, seen


def _repeated(table: PageTable, copies: int) -> PageTable:
    """A table on the host whose requests come as often one after another."""
    pages, valid, first = map(np.asarray, table)
    begins = [first[:-1] + copy * first[-1] for copy in range(copies)]
    first = np.append(np.concatenate(begins), copies * first[-1]).astype(np.int32)
    return PageTable(np.tile(pages, copies), np.tile(valid, copies), first)


def _tiles(request: SpeculativeRequest) -> int:
    return -(-request.block_length // TILE_ROWS)
