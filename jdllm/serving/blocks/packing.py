"""Packs finished blocks that are to be stored into arrays of compiled sizes."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdllm.decoding.batch import Batch
from jdllm.decoding.rules import evaluated_apart
from jdllm.execution.paged.parts import Storage
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.execution.paged.stored_keys import StoredKeys
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import block_range
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
    - `keys`: the keys that ranges refer to; `None` for the rows' own keys.
    - `ends`: the row behind the last one of each request.
    """

    tokens: np.ndarray
    rows: Rows
    storage: Storage
    keys: StoredKeys | None
    ends: np.ndarray

    @property
    def arguments(self) -> tuple[np.ndarray, Rows, Storage, StoredKeys | None]:
        """What the device needs to store them."""
        return self.tokens, self.rows, self.storage, self.keys


class PackedChoices(NamedTuple):
    """Finished blocks of a model with shifted logits, of which some foretell the token behind them.

    - `batch`: the rows; head rows are the last ones of blocks that foretell a token, plain ones first.
    - `storage`, `keys`: as `PackedBlocks` has them.
    - `plain`: how many head rows have no filter and are not listed.
    - `order`: which requests the head rows belong to.
    """

    batch: Batch
    storage: Storage
    keys: StoredKeys | None
    plain: np.ndarray
    order: np.ndarray

    @property
    def arguments(self) -> tuple[Batch, Storage, StoredKeys | None, np.ndarray, None]:
        """What the device needs; block models have no penalties."""
        return self.batch, self.storage, self.keys, self.plain, None


def part_of(request: BlockRequest, chunk: int) -> range:
    """The tokens of a request that its next part stores: up to `chunk`, whole pages, unless these are all."""
    return range(request.computed, min(request.known, request.computed // PAGE_ROWS * PAGE_ROWS + chunk))


def pages_of(rows: int) -> int:
    """Pages that so many rows take."""
    return -(-rows // PAGE_ROWS)


def pack_blocks(
    requests: Sequence[BlockRequest],
    parts: Sequence[range],
    config: ModelConfig,
    pool: PageBook,
    entry: Entry,
    entries: int | None,
) -> PackedBlocks:
    """Lay out a part of each request, one after another.

    Arguments:
    - `requests`: of which something is to be stored.
    - `parts`: the positions of each that are stored now: whole blocks.
    - `config`: the model.
    - `pool`: the pages of the requests.
    - `entry`: the sizes of the arrays.
    - `entries`: pages that are read, at most, where a part does not begin at the first token of its request;
      `None` where all do.
    """
    tokens, positions, k_start, k_end = (np.zeros(entry.rows, np.int32) for _ in range(4))
    starts, keys, filled = np.cumsum([0, *map(len, parts)]), None, []
    bases = starts
    if entries is not None:
        table = pool.page_table([r.id for r in requests], [part.stop for part in parts], entries)
        keys, bases = StoredKeys(table.pages, table.valid), PAGE_ROWS * np.asarray(table.first)
    for request, part, start, base in zip(requests, parts, starts, bases, strict=False):
        rows = slice(start, start + len(part))
        tokens[rows] = request.tokens[part.start : part.stop]
        positions[rows] = part
        own = dataclasses.replace(config, block_length=request.block_length)
        first, end = block_range(own, positions[rows], part.stop)
        k_start[rows], k_end[rows] = base + first, base + end
        pages = pool.pages_of(request.id)[part.start // PAGE_ROWS : pages_of(part.stop)]
        source = np.arange(rows.start, rows.stop)[None, None]
        filled.append(Filled(pages, source, positions[rows], part.start % PAGE_ROWS))
    # As many as there are segments: the number of entries that are compiled for depends on it.
    nothing = Filled(tokens[:0], np.zeros((1, 1, 0), np.int64), tokens[:0])
    filled += [nothing] * (entry.segments - len(filled))
    storage = storage_of(filled, entry.rows, whole=False)
    return PackedBlocks(tokens, Rows(positions, k_start, k_end), storage, keys, starts[1:])


def foretells(request: BlockRequest, part: range) -> bool:
    """Whether the last row of a part gives the first token of the current block, which nothing else gives."""
    return request.spec.shifted and part.stop == request.known and request.opens


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
    return PackedChoices(batch, packed.storage, packed.keys, plain, order)
