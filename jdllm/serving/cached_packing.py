"""Packs the requests of one cached dispatch: whole sequences to refresh, or rows that a reuse forwards."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.batch import Batch
from jdllm.decoding.caches import Phase, kept, policy_of
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.selection import Scoring, Selection
from jdllm.pallas.split_attention import PageTable, with_fresh_rows
from jdllm.planning.buckets import power_bucket, steps_per_dispatch
from jdllm.serving.kv_pool import KvPool
from jdllm.serving.packing import Packed, head_rows, pack, segment_params, segments_bucket
from jdllm.serving.request import Request

TILE_ROWS = 32
"""Rows that read the pool together; those of a request are padded to a multiple."""

_SMALLEST_ENTRIES = 8
_SMALLEST_BLOCK = 32


class RefreshBatch(NamedTuple):
    """A packed batch of whole sequences, and what of them is stored.

    - `packed`: as of `jdllm.serving.packing.pack`.
    - `selection`, `table`, `scoring`: as of `jdllm.decoding.cached.refresh`.
    """

    packed: Packed
    selection: Selection
    table: PageTable
    scoring: Scoring | None


class ReuseBatch(NamedTuple):
    """A packed batch of the rows that are forwarded, and the pages that each tile of them reads."""

    packed: Packed
    table: PageTable


def pack_refresh(requests: Sequence[Request], config: ModelConfig, pool: KvPool) -> RefreshBatch:
    """Lay out whole sequences, and say which rows each layer may store.

    What a request forwards until its next refresh is noted in `forwarded` and `stored`.
    """
    packed = pack(requests, config)
    rows, segments = len(packed.batch.tokens), segments_bucket(len(requests))
    starts = np.cumsum([0, *(len(r.tokens) for r in requests)])
    names = ("block_first", "block_rows", "keep", "scored", "per_head", "width")
    columns = {name: np.zeros(segments, np.int32) for name in names}
    columns["width"][:] = 1
    candidate_rows, candidate_segments = [], []
    for index, (request, start) in enumerate(zip(requests, starts, strict=False)):
        first, stop = request.block.start, request.block.stop
        columns["block_first"][index], columns["block_rows"][index] = start + first, stop - first
        policy = policy_of(request.sampling)
        if policy is None or request.phase is not Phase.REFRESH:
            continue
        candidates = policy.candidates(request.view())
        forwarded = np.ones(len(request.tokens), bool)
        forwarded[candidates] = False
        request.forwarded = np.flatnonzero(forwarded)
        request.stored = kept(request.sampling, len(candidates))
        candidate_rows.append(start + candidates)
        candidate_segments.append(np.full(len(candidates), index))
        columns["keep"][index] = request.stored
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
    reads = [(r.index, int(keep)) for r, keep in zip(requests, columns["keep"], strict=False)]
    # As many as these rows can fill: entries that nobody owns are written nowhere, but still gathered.
    table = _table(pool, reads, segments, rows // pool.page_rows + segments)
    return RefreshBatch(packed, selection, table, _scoring(columns))


def _scoring(columns: Mapping[str, np.ndarray]) -> Scoring | None:
    if not columns["scored"].any():
        return None
    block_rows = power_bucket(int(columns["block_rows"].max()), _SMALLEST_BLOCK)
    return Scoring(block_rows)


def pack_reuse(requests: Sequence[Request], config: ModelConfig, pool: KvPool) -> ReuseBatch:
    """Lay out the forwarded rows of each request in whole tiles, and list what each tile reads.

    It reads what is stored of its request, and all the rows of it that are forwarded.
    """
    tiles_of = [-(-len(r.forwarded) // TILE_ROWS) for r in requests]
    starts = np.cumsum([0, *tiles_of]) * TILE_ROWS
    tiles = power_bucket(sum(tiles_of), 1)
    tokens, positions, unused = (np.zeros(tiles * TILE_ROWS, np.int32) for _ in range(3))
    parts, candidates = [], [request.candidates() for request in requests]
    for index, (request, start) in enumerate(zip(requests, starts, strict=False)):
        stop = start + len(request.forwarded)
        tokens[start:stop], positions[start:stop] = request.tokens[request.forwarded], request.forwarded
        row = start + np.searchsorted(request.forwarded, candidates[index])
        parts.append((row, np.full_like(row, index)))
    segments = segments_bucket(len(requests))
    row, segment = (np.concatenate(column) for column in zip(*parts, strict=True))
    head = head_rows(row, row, segment, segments)
    params = segment_params(requests, segments, steps_per_dispatch(len(head.row)), config)
    batch = Batch(tokens, Rows(positions, unused, unused), head, params)
    owner = np.repeat(np.arange(len(requests)), tiles_of)
    forwarded = np.array([len(r.forwarded) for r in requests])
    first_row, seen = (padded(x[owner], tiles) for x in (starts, forwarded))
    reads = [(r.index, r.stored) for r in (requests[i] for i in owner.tolist())]
    fresh = sum(map(pool.pages_for, seen.tolist()))
    entries = power_bucket(fresh + sum(pool.pages_for(rows) for _, rows in reads), _SMALLEST_ENTRIES)
    table = _table(pool, reads, tiles, entries - fresh)
    table = with_fresh_rows(table, first_row, seen, pool.page_rows)
    return ReuseBatch(Packed(batch, candidates), table)


def _table(pool: KvPool, reads: Sequence[tuple[int, int]], size: int, entries: int) -> PageTable:
    """The pages of each (request, live rows), and of none for what is missing to `size`."""
    table = pool.page_table([request for request, _ in reads], [rows for _, rows in reads], entries)
    first = np.asarray(table.first)
    return table._replace(first=padded(first, size + 1, int(first[-1])))


def _joined(parts: Sequence[np.ndarray], size: int, fill: int) -> np.ndarray:
    return padded(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int32), size, fill)
