"""Packs the requests of one cached dispatch: whole sequences to refresh, or rows that a reuse forwards."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.batch import Batch
from jdllm.decoding.cache_policies import Phase, kept, policy_of
from jdllm.decoding.caches.policy import CachePolicy
from jdllm.execution.paged.selection import Selection
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.pallas.split_attention import PageTable, with_fresh_rows
from jdllm.planning.ladder import Entry
from jdllm.serving.editing import packed_editing
from jdllm.serving.launch import Stored
from jdllm.serving.packing import LaidOut, Packed, head_rows, pack, segment_params
from jdllm.serving.pool.page_book import Live, PageBook
from jdllm.serving.request import Request
from jdllm.serving.rule_states import packed_states


class RefreshBatch(NamedTuple):
    """A packed batch of whole sequences, and the rows that are stored.

    - `packed`: the batch.
    - `selection`: which rows may be stored, and how many.
    - `table`: the pages of each segment.
    - `stored`: for each request the rows that are stored of it, `None` if none is.
    """

    packed: Packed
    selection: Selection
    table: PageTable
    stored: list[Stored | None]


class StoringOf(NamedTuple):
    """What refreshes store: the last three of `RefreshBatch`."""

    selection: Selection
    table: PageTable
    stored: list[Stored | None]


class ReuseBatch(NamedTuple):
    """A packed batch of the rows that are forwarded.

    - `packed`: the batch.
    - `table`: the pages that each tile of rows reads.
    - `source`: int32 `[rows]`, where rows take tokens that the host has not seen, as in `Unseen`.
    """

    packed: Packed
    table: PageTable
    source: np.ndarray


def pack_refresh(
    requests: Sequence[Request], config: ModelConfig, pool: PageBook, entry: Entry
) -> RefreshBatch:
    """Lay out what refreshes evaluate, and say which rows each layer may store."""
    packed = pack(requests, config, entry)
    return RefreshBatch(packed, *storing_of(requests, packed.batch.rows, pool, entry))


def storing_of(requests: Sequence[Request], packed: Rows, pool: PageBook, entry: Entry) -> StoringOf:
    """Which rows each layer may store of requests that are packed one after another.

    Arguments:
    - `packed`: their rows, of this batch alone. The candidates of a request that refreshes once see each
      other only, which is written into them.
    """
    rows, segments = entry.rows, entry.segments
    stored: list[Stored | None] = [None] * len(requests)
    evaluated = [r.evaluated for r in requests]
    starts = np.cumsum([0, *map(len, evaluated)])
    names = ("block_first", "block_rows", "keep", "scored", "per_head", "width")
    columns = {name: np.zeros(segments, np.int32) for name in names}
    columns["width"][:] = 1
    candidate_rows, candidate_segments = [], []
    k_end = np.asarray(packed.k_end)
    for index, (request, start) in enumerate(zip(requests, starts, strict=False)):
        first, stop = request.block.start, request.block.stop
        columns["block_first"][index], columns["block_rows"][index] = start + first, stop - first
        policy = policy_of(request.sampling)
        if policy is None or request.phase is not Phase.REFRESH:
            continue
        storable = storable_of(request, policy)
        candidates = np.flatnonzero(storable)
        keep = kept(request.sampling, len(candidates))
        stored[index] = Stored(evaluated[index][~storable], keep)
        if policy.once:  # the candidates are the first rows, and see each other only
            k_end[start : start + len(candidates)] = start + len(candidates)
        candidate_rows.append(start + candidates)
        candidate_segments.append(np.full(len(candidates), index))
        columns["keep"][index] = keep
        columns["scored"][index], columns["per_head"][index] = policy.scored, policy.per_head
        columns["width"][index] = request.sampling.effective("pool_kernel") if policy.scored else 1
    selection = Selection(
        columns["block_first"],
        columns["block_rows"],
        _joined(candidate_rows, rows, 0),
        _joined(candidate_segments, rows, segments),
        columns["keep"],
        columns["scored"].astype(bool),
        columns["per_head"].astype(bool),
        columns["width"],
    )
    reads = [(r.id, int(keep)) for r, keep in zip(requests, columns["keep"], strict=False)]
    # As many as these rows can fill: entries that nobody owns are written nowhere, but still gathered.
    table = _table(pool, reads, segments, rows // pool.page_rows + segments)
    return StoringOf(selection, table, stored)


def storable_of(request: Request, policy: CachePolicy) -> np.ndarray:
    """Which of the positions that a refresh evaluates may be stored; bool."""
    storable = np.zeros(len(request.tokens), bool)
    storable[policy.candidates(request.view())] = True
    return storable[request.evaluated]


def reuse_demand(request: Request, page_rows: int, tile_rows: int) -> tuple[int, int, int]:
    """Packed rows, head rows and entries of the page table of a request that reuses.

    Arguments:
    - `page_rows`: of a page of the pool.
    - `tile_rows`: of the ladder.
    """
    tiles = -(-len(request.forwarded) // tile_rows)
    pages = _pages(request.stored, page_rows) + -(-len(request.forwarded) // page_rows)
    return tiles * tile_rows, len(request.candidates()), tiles * pages


def pack_reuse(
    requests: Sequence[Request],
    config: ModelConfig,
    pool: PageBook,
    entry: Entry,
    entries: int,
    tile_rows: int,
) -> ReuseBatch:
    """Lay out the forwarded rows of each request in whole tiles, and list what each tile reads.

    It reads the stored rows of its request, and all its forwarded rows.

    Arguments:
    - `entries`: of the page table.
    - `tile_rows`: of the ladder.
    """
    starts, table = tiles_of(requests, pool, entry, entries, tile_rows)
    packed, source = pack_forwarded(requests, config, entry, starts)
    return ReuseBatch(packed, table, source)


def tiles_of(
    requests: Sequence[Request], pool: PageBook, entry: Entry, entries: int, tile_rows: int
) -> tuple[np.ndarray, PageTable]:
    """The first packed row of each request that forwards whole tiles, and what each tile reads.

    Arguments:
    - `entries`: of the page table.
    - `tile_rows`: of the ladder.
    """
    counts = [-(-len(r.forwarded) // tile_rows) for r in requests]
    starts = np.cumsum([0, *counts]) * tile_rows
    tiles = entry.rows // tile_rows
    owner = np.repeat(np.arange(len(requests)), counts)
    forwarded = np.array([len(r.forwarded) for r in requests])
    first_row, seen = (padded(x[owner], tiles) for x in (starts, forwarded))
    reads = [(r.id, r.stored) for r in (requests[i] for i in owner.tolist())]
    # Padded at the end: most of a large pool's entries are padding.
    table = _table(pool, reads, tiles, sum(_pages(rows, pool.page_rows) for _, rows in reads))
    table = with_fresh_rows(table, first_row, seen, pool.page_rows)
    pages, valid = (padded(np.asarray(x), entries) for x in (table.pages, table.valid))
    return starts[:-1], PageTable(pages, valid, table.first)


def pack_forwarded(
    requests: Sequence[Request], config: ModelConfig, entry: Entry, starts: Sequence[int] | np.ndarray
) -> tuple[Packed, np.ndarray]:
    """Lay out the rows that each request forwards, whose key ranges mean nothing.

    Arguments:
    - `starts`: the first packed row of each request.

    Returns the batch, and int32 `[rows]`, where rows take tokens that the host has not seen, as in `Unseen`.
    """
    tokens, rows, head, candidates = lay_out_forwarded(requests, entry, starts)
    source = np.full(entry.rows, -1, np.int32)
    for request, start in zip(requests, starts, strict=True):
        if request.awaited is not None:
            at, first = request.awaited
            source[start + np.searchsorted(request.forwarded, at)] = first + np.arange(len(at))
    segments, states = segment_params(requests, entry, config), packed_states(requests, candidates, entry)
    stops = np.cumsum([len(masked) for masked in candidates])
    own = np.split(np.asarray(head.row)[: stops[-1]], stops[:-1])
    editing = packed_editing(requests, own, config, entry)
    return Packed(Batch(tokens, rows, head, segments, states, editing), candidates), source


def lay_out_forwarded(
    requests: Sequence[Request], entry: Entry, starts: Sequence[int] | np.ndarray
) -> LaidOut:
    """What `pack_forwarded` lays out, without the parameters of the requests."""
    tokens, positions, unused = (np.zeros(entry.rows, np.int32) for _ in range(3))
    parts, candidates = [], [request.candidates() for request in requests]
    for index, (request, start) in enumerate(zip(requests, starts, strict=True)):
        stop = start + len(request.forwarded)
        tokens[start:stop] = request.tokens[request.forwarded]
        positions[start:stop] = request.positions(request.forwarded)
        row = start + np.searchsorted(request.forwarded, candidates[index])
        parts.append((row, np.full_like(row, index)))
    row, segment = (np.concatenate(column) for column in zip(*parts, strict=True))
    head = head_rows(row, row, segment, entry)
    return LaidOut(tokens, Rows(positions, unused, unused), head, candidates)


def _pages(live: Live, page_rows: int) -> int:
    """How many pages have live rows."""
    return int(np.count_nonzero(live)) if isinstance(live, np.ndarray) else -(-live // page_rows)


def _table(pool: PageBook, reads: Sequence[tuple[int, Live]], size: int, entries: int) -> PageTable:
    """The pages of each (request, live rows), and of none for what is missing to `size`."""
    table = pool.page_table([request for request, _ in reads], [rows for _, rows in reads], entries)
    first = np.asarray(table.first)
    return table._replace(first=padded(first, size + 1, int(first[-1])))


def _joined(parts: Sequence[np.ndarray], size: int, fill: int) -> np.ndarray:
    return padded(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int32), size, fill)
