"""Packs the requests of an iteration of adaptive parallel decoding into the arrays of a bucket."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.adaptive import AdaptiveBatch, AdaptiveSegments, Verified
from jdllm.execution.paged.decode import Window
from jdllm.execution.paged.place import Place
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.execution.paged.stored_keys import StoredKeys
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import key_ranges
from jdllm.planning.ladder import Entry
from jdllm.serving.packing import LaidOut, lay_out_whole
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request


class PackedAdaptive(NamedTuple):
    """A packed batch, and for each request the positions of its window, which follow one another in it."""

    batch: AdaptiveBatch
    candidates: list[np.ndarray]


class VerifiedRows(NamedTuple):
    """Rows of a request that the verifier evaluates together, at least one."""

    request: Request
    rows: range


def pack_adaptive(
    requests: Sequence[Request],
    windows: Sequence[range],
    config: ModelConfig,
    verifier_config: ModelConfig,
    pool: PageBook,
    entry: Entry,
) -> PackedAdaptive:
    """Lay out the requests as the diffusion model sees them, and what the verifier evaluates of them.

    Arguments:
    - `windows`: what the verifier evaluates of each request, a `Spans` of the verifier's keys.
    - `pool`: of the verifier.
    - `entry`: has as many head rows as the windows have rows, or more.
    """
    laid_out = lay_out_whole(requests, config, entry)
    pages = entry.rows // PAGE_ROWS + entry.segments
    return with_verified(laid_out, requests, windows, verifier_config, pool, entry, pages)


def with_verified(
    laid_out: LaidOut,
    requests: Sequence[Request],
    windows: Sequence[range],
    config: ModelConfig,
    pool: PageBook,
    entry: Entry,
    pages: int,
) -> PackedAdaptive:
    """What the diffusion model evaluates of some requests, with what the verifier evaluates of them.

    Arguments:
    - `laid_out`: the rows of the diffusion model.
    - `windows`: what the verifier evaluates of each request, a `Spans` of the verifier's keys.
    - `config`, `pool`: of the verifier.
    - `entry`: has as many head rows as the windows have rows, or more.
    - `pages`: that the requests may have in the pool, padding included.
    """
    tokens, rows, head, candidates = laid_out
    first = np.cumsum([0, *map(len, windows)])
    parts = [VerifiedRows(*part) for part in zip(requests, windows, strict=True)]
    known = [request.tokens[w.start : w.stop] for request, w in zip(requests, windows, strict=True)]
    verified_from = [
        at + np.maximum(masked - 1, 0) - window.start
        for at, masked, window in zip(first[:-1], candidates, windows, strict=True)
    ]
    size = entry.head_rows
    batch = AdaptiveBatch(
        tokens,
        rows,
        pack_verified(parts, config, pool, size, pages),
        padded(np.concatenate(known).astype(np.int32), size),
        padded(_drafted_by(candidates, windows), size, -1),
        padded(np.concatenate(verified_from).astype(np.int32), size),
        head,
        _segments(requests, entry.segments),
    )
    return PackedAdaptive(batch, candidates)


def _drafted_by(candidates: Sequence[np.ndarray], windows: Sequence[range]) -> np.ndarray:
    """`AdaptiveBatch.drafted_by` of windows that follow one another."""
    drafted = []
    for first, masked, window in zip(
        np.cumsum([0, *map(len, candidates)]), candidates, windows, strict=False
    ):
        by = np.full(len(window), -1, np.int32)
        inside = masked[masked < window.stop]  # all but the last, which predicts nothing
        by[inside - window.start] = first + np.arange(len(inside))
        drafted.append(by)
    return np.concatenate(drafted)


def pack_verified(
    parts: Sequence[VerifiedRows], config: ModelConfig, pool: PageBook, size: int, entries: int
) -> Verified:
    """Rows of the verifier, padded to `size` with rows that see nothing and are stored nowhere.

    Arguments:
    - `entries`: of the list of pages that they see.
    """
    page = np.iinfo(np.int32).max - np.arange(size, dtype=np.int32)
    positions, start, end, row = (np.zeros(size, np.int32) for _ in range(4))
    owners, stops = [part.request.id for part in parts], [part.rows.stop for part in parts]
    table, at = pool.page_table(owners, stops, entries), 0
    for (request, rows), base in zip(parts, np.asarray(table.first) * PAGE_ROWS, strict=False):
        packed = slice(at, at + len(rows))
        positions[packed] = rows
        page[packed] = pool.pages_of(request.id)[positions[packed] // PAGE_ROWS]
        row[packed] = positions[packed] % PAGE_ROWS
        first, last = key_ranges(config, int(base), rows.stop)
        start[packed], end[packed] = first[rows.start :], last[rows.start :]
        at = packed.stop
    return Verified(positions, Place(page, row), Window(StoredKeys(table.pages, table.valid), start, end))


def parts_of(requests: Sequence[Request], unread: Sequence[range], most: int) -> Iterator[list[VerifiedRows]]:
    """The rows of some requests that are not stored, in groups of at most `most` rows."""
    group, room = [], most
    for request, left in zip(requests, unread, strict=True):
        while left:
            group.append(VerifiedRows(request, left[:room]))
            left, room = left[room:], room - len(group[-1].rows)
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def _segments(requests: Sequence[Request], size: int) -> AdaptiveSegments:
    """One row per request, padded with segments that ask for nothing."""
    rows = [{**r.spec.segment, "step": np.int32(r.steps)} for r in requests]
    columns = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
    return AdaptiveSegments(**{name: padded(x, size) for name, x in columns.items()})
