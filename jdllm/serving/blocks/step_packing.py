"""Packs finished blocks together with the first step of the block behind them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jdllm.arrays import padded
from jdllm.decoding.batch import Batch
from jdllm.execution.paged.place import Place
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.pallas.split_attention import FRESH_UNIT, PageTable, fresh_unit_of, with_fresh_rows
from jdllm.planning.ladder import Entry
from jdllm.serving.blocks.packing import pages_of
from jdllm.serving.blocks.request import BlockRequest
from jdllm.serving.editing import packed_editing
from jdllm.serving.packing import head_rows, segment_params
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.rule_states import packed_states


class PackedSteps(NamedTuple):
    """Finished blocks, and the first step of the block behind each.

    - `batch`: the rows; head rows are those that the step evaluates.
    - `place`: where rows of finished blocks are stored.
    - `table`: what each tile of rows sees.
    - `source`: where rows take tokens that the host has not seen, as in `Unseen`.
    """

    batch: Batch
    place: Place
    table: PageTable
    source: Int[np.ndarray, " rows"]

    @property
    def arguments(self) -> tuple[Batch, Place, PageTable]:
        """What the device needs, beside tokens that parts have left there."""
        return self.batch, self.place, self.table


class _Blocks(NamedTuple):
    """The blocks of all requests, one after another, each in tiles of its own.

    - `owner`: the index of their request.
    - `nth`: how many blocks of their request come before.
    - `length`: their positions.
    - `tiles`: the tiles that each fills.
    - `start`: the packed row with which each begins.
    """

    owner: Int[np.ndarray, " blocks"]
    nth: Int[np.ndarray, " blocks"]
    length: Int[np.ndarray, " blocks"]
    tiles: Int[np.ndarray, " blocks"]
    start: Int[np.ndarray, " blocks"]


def blocks_of(request: BlockRequest) -> int:
    """How many blocks are evaluated: finished ones that are not stored, and the one that is filled."""
    return (request.known - request.computed) // request.block_length + 1


def needs_of(request: BlockRequest, tile_rows: int) -> tuple[int, int]:
    """Tiles of so many rows that the blocks of a request fill, and entries of the page table of these."""
    blocks, of_block = blocks_of(request), -(-request.block_length // tile_rows)
    entries = of_block if fresh_unit_of(tile_rows) < FRESH_UNIT else 1  # of the fresh rows of a block
    seen = entries * blocks * (blocks + 1) // 2  # each block sees itself and those before
    return blocks * of_block, of_block * (blocks * pages_of(request.computed) + seen)


def pack_steps(
    requests: Sequence[BlockRequest],
    candidates: Sequence[np.ndarray],
    config: ModelConfig,
    pool: PageBook,
    entry: Entry,
    entries: int,
    tile_rows: int,
) -> PackedSteps:
    """Lay out the blocks of each request.

    Arguments:
    - `requests`: each with a block that is being filled; blocks before it may have to be stored.
    - `candidates`: for each request the positions of its head rows, which follow one another in the batch.
    - `config`: the model.
    - `pool`: the pages of the requests.
    - `entry`: the sizes of the arrays.
    - `entries`: of the page table.
    - `tile_rows`: rows of a tile.
    """
    blocks = _laid_out(requests, tile_rows)
    row, position = _rows_of(blocks, requests)
    tokens, positions, unused = (np.zeros(entry.rows, np.int32) for _ in range(3))
    tokens[row] = np.concatenate([r.tokens[r.computed : r.known + r.block_length] for r in requests])
    positions[row] = position
    last = np.cumsum([blocks_of(request) for request in requests]) - 1  # the blocks that are filled
    begins = blocks.start[last] - [request.known for request in requests]
    rows = [begin + at for begin, at in zip(begins.tolist(), candidates, strict=True)]
    segment, asked = np.repeat(np.arange(len(requests)), list(map(len, candidates))), np.concatenate(rows)
    batch = Batch(
        tokens,
        Rows(positions, unused, unused),
        head_rows(asked, asked, segment, entry),
        segment_params(requests, entry, config),
        packed_states(requests, candidates, entry),
        packed_editing(requests, rows, config, entry),
    )
    place = _place(blocks, requests, pool, row, position, entry.rows)
    table = _table(blocks, requests, pool, entry.rows, tile_rows, entries)
    return PackedSteps(batch, place, table, _source(requests, row, entry.rows))


def _source(
    requests: Sequence[BlockRequest], row: Int[np.ndarray, " packed"], size: int
) -> Int[np.ndarray, " rows"]:
    """For each packed row the index of a token that the host has not seen, -1 where it has."""
    source, first = np.full(size, -1, np.int32), 0
    for request in requests:
        if request.awaited is not None:
            at, left = request.awaited
            source[row[first + at - request.computed]] = left + np.arange(len(at))
        first += request.known + request.block_length - request.computed
    return source


def _laid_out(requests: Sequence[BlockRequest], tile_rows: int) -> _Blocks:
    count = np.array([blocks_of(request) for request in requests])
    owner = np.repeat(np.arange(len(requests)), count)
    nth = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    length = np.array([request.block_length for request in requests])[owner]
    tiles = -(-length // tile_rows)
    return _Blocks(owner, nth, length, tiles, (np.cumsum(tiles) - tiles) * tile_rows)


def _rows_of(
    blocks: _Blocks, requests: Sequence[BlockRequest]
) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
    """The packed row and the position of each row of the blocks, in their order."""
    block = np.repeat(np.arange(len(blocks.owner)), blocks.length)
    within = np.arange(len(block)) - (np.cumsum(blocks.length) - blocks.length)[block]
    first = np.array([request.computed for request in requests])[blocks.owner] + blocks.nth * blocks.length
    return blocks.start[block] + within, first[block] + within


def _place(
    blocks: _Blocks,
    requests: Sequence[BlockRequest],
    pool: PageBook,
    row: Int[np.ndarray, " rows"],
    position: Int[np.ndarray, " rows"],
    size: int,
) -> Place:
    """Where the rows of finished blocks are stored. Other rows are stored in no page, each in another one."""
    page, of_page = np.iinfo(np.int32).max - np.arange(size, dtype=np.int32), np.zeros(size, np.int32)
    held = [pool.pages_of(request.id) for request in requests]
    first = np.cumsum([0, *map(len, held)])[:-1]
    finished = np.append(blocks.owner[1:] == blocks.owner[:-1], False)
    stored = np.repeat(finished, blocks.length)
    owner, at = np.repeat(blocks.owner, blocks.length)[stored], position[stored]
    page[row[stored]] = np.concatenate(held)[first[owner] + at // PAGE_ROWS]
    of_page[row[stored]] = at % PAGE_ROWS
    return Place(page, of_page)


def _table(
    blocks: _Blocks,
    requests: Sequence[BlockRequest],
    pool: PageBook,
    rows: int,
    tile_rows: int,
    entries: int,
) -> PageTable:
    """The stored rows of its request that each tile sees, its own block and the blocks before."""
    block = np.repeat(np.arange(len(blocks.owner)), blocks.tiles)  # of each tile
    stored = [request.computed for request in requests]
    own = pool.page_table([request.id for request in requests], stored, sum(map(pages_of, stored)))
    owner, begin = blocks.owner[block], np.asarray(own.first)
    count = np.diff(begin)[owner]
    first = np.append(0, np.cumsum(count)).astype(np.int32)
    entry = np.repeat(begin[owner] - first[:-1], count) + np.arange(first[-1])  # of its request
    pages, valid = (np.asarray(x)[entry] for x in (own.pages, own.valid))
    table = PageTable(pages, valid, padded(first, rows // tile_rows + 1, int(first[-1])))
    seen = blocks.nth[block] + 1
    tile = np.repeat(np.arange(len(block)), seen)
    back = np.cumsum(seen)[tile] - 1 - np.arange(len(tile))  # how many blocks before the tile's own
    run = block[tile] - back
    fresh, unit = (blocks.start[run], blocks.length[run]), fresh_unit_of(tile_rows)
    table = with_fresh_rows(table, *fresh, PAGE_ROWS, tile, unit)
    pages, valid = (padded(np.asarray(x), entries) for x in (table.pages, table.valid))
    return PageTable(pages, valid, table.first)
