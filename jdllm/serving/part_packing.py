"""Packs evaluations over parts of a long context into arrays of compiled sizes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.execution.paged.parts import Storage
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.block import Rows
from jdllm.pallas.split_attention import PageTable
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import TILE_ROWS
from jdllm.prefilling.segments import Segment

_USUAL_PAGES = 32
"""Pages that a tile sees, of a chunk and an instruction of up to 2048 tokens together."""


class Filled(NamedTuple):
    """Rows of an evaluation that fill pages.

    - `pages`: int32, as many as the rows take.
    - `source`: `[#layers, #kv_heads, rows]`, the packed row of each.
    - `positions`: of the stored keys.
    - `kept`: rows that lie before them in the first page, and stay there.
    """

    pages: np.ndarray
    source: np.ndarray
    positions: np.ndarray
    kept: int = 0


class Read(NamedTuple):
    """Pages that some rows see, and how many rows of each are live."""

    pages: np.ndarray
    valid: np.ndarray


def packed_rows(segment: Segment, size: int) -> tuple[np.ndarray, Rows]:
    """Tokens and `Rows`, padded with rows that see nothing."""
    tokens, *rows = (padded(x, size) for x in segment)
    return tokens, Rows(*rows)


def storage_of(
    filled: Sequence[Filled], rows: int, *, whole: bool = True, parts: int | None = None
) -> Storage:
    """The rows that are stored of an evaluation.

    Arguments:
    - `rows`: packed rows, padding included. The number of entries depends on them alone, so that their
      executable serves any lengths; on that of parts only where these have less than a page on average.
    - `whole`: whether all rows begin with a page; otherwise those before them in a page may be kept.
    - `parts`: room for so many, as for the segments of an entry, on whose number the executable depends; by
      default for those at hand.
    """
    pages = rows // PAGE_ROWS
    entries = pages + power_bucket(len(filled) if parts is None else parts, max(pages, 32))
    layers, heads = (max((f.source.shape[axis] for f in filled), default=1) for axis in (0, 1))
    page = np.iinfo(np.int32).max - np.arange(entries, dtype=np.int32)
    source = np.zeros((layers, entries, heads, PAGE_ROWS), np.int32)
    positions = np.zeros((entries, PAGE_ROWS), np.int32)
    kept = None if whole else np.zeros(entries, np.int32)
    at = 0
    for pages, rows_of, places, before in filled:
        count, slots = len(pages), len(pages) * PAGE_ROWS
        if not count:
            continue
        # Slots beyond the last row repeat it: they are not live.
        slot = np.clip(np.arange(slots) - before, 0, rows_of.shape[-1] - 1)
        if kept is not None:
            kept[at] = before
        by_page = rows_of[:, :, slot].reshape(*rows_of.shape[:2], count, PAGE_ROWS)
        page[at : at + count] = pages
        source[:, at : at + count] = np.moveaxis(by_page, 1, 2)
        positions[at : at + count] = places[slot].reshape(count, PAGE_ROWS)
        at += count
    return Storage(page, source, positions, kept)


def table_of(reads: Sequence[Read], tiles: int) -> PageTable:
    """The table of tiles of which the first see the given pages, and the others nothing.

    The number of entries depends on the number of tiles alone, as long as a tile sees a few pages.
    """
    first = np.cumsum([0, *(len(read.pages) for read in reads)]).astype(np.int32)
    entries = power_bucket(int(first[-1]), tiles * _USUAL_PAGES)
    pages, valid = (
        padded(np.concatenate([np.zeros(0, np.int32), *column]).astype(np.int32), entries)
        for column in (zip(*reads, strict=True) if reads else ((), ()))
    )
    return PageTable(pages, valid, padded(first, tiles + 1, int(first[-1])))


def in_tiles(segments: Sequence[Segment]) -> list[Segment]:
    """Segments that each fill whole tiles; added rows see nothing."""
    return [
        Segment(*(padded(x, -(-segment.size // TILE_ROWS) * TILE_ROWS) for x in segment))
        for segment in segments
    ]
