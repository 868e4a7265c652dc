"""Packs parts of prompts, and sequences that grow by a token, into arrays of compiled sizes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.batch import Batch, SegmentParams
from jdllm.decoding.causal import Reads, Sequences
from jdllm.decoding.causal_sampling import PENALTIES, penalties_of
from jdllm.decoding.penalty import Penalty
from jdllm.decoding.rules import evaluated_apart
from jdllm.execution.paged.parts import Storage
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.execution.paged.stored_keys import StoredKeys
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import key_ranges, window_start
from jdllm.planning.buckets import power_bucket
from jdllm.planning.ladder import MAX_SEGMENTS, Entry
from jdllm.serving.causal.request import CausalRequest
from jdllm.serving.packing import head_rows, segment_params
from jdllm.serving.part_packing import Filled, storage_of
from jdllm.serving.pool.page_book import PageBook

_STOPS = 8
"""Stop ids of a sequence, at least."""


class PackedPrompts(NamedTuple):
    """Parts of prompts.

    - `batch`: the parts; the head rows are the last rows of prompts that end, plain rows first.
    - `storage`: the rows to store.
    - `keys`: the keys that ranges refer to; `None` for the rows' own keys.
    - `plain`: how many head rows have no control and no filter and are not listed.
    - `penalty`: of the ids that the prompts hold; `None` if no segment has one.
    - `order`: which requests the head rows belong to.
    """

    batch: Batch
    storage: Storage
    keys: StoredKeys | None
    plain: np.ndarray
    penalty: Penalty | None
    order: np.ndarray

    @property
    def arguments(self) -> tuple[Batch, Storage, StoredKeys | None, np.ndarray, Penalty | None]:
        """What the device needs."""
        return self.batch, self.storage, self.keys, self.plain, self.penalty


class PackedSequences(NamedTuple):
    """Sequences that generate.

    - `sequences`: the last token of each, and what each asks of the sampler.
    - `reads`: the stored rows that each sequence sees: all but its last token.
    - `penalty`: of the known ids; `None` if no segment has one.
    - `order`: which requests the segments belong to.
    """

    sequences: Sequences
    reads: Reads
    penalty: Penalty | None
    order: np.ndarray

    @property
    def arguments(self) -> tuple[Sequences, Reads, Penalty | None]:
        """What the device needs."""
        return self.sequences, self.reads, self.penalty


def part_of(request: CausalRequest, chunk: int) -> range:
    """The tokens of a request that its next part evaluates: at most `chunk`, whole pages but at the end."""
    return range(request.computed, min(request.known, request.computed + chunk))


def pages_of(rows: int) -> int:
    """Pages that so many rows take."""
    return -(-rows // PAGE_ROWS)


def pack_prompts(
    requests: Sequence[CausalRequest],
    parts: Sequence[range],
    config: ModelConfig,
    pool: PageBook,
    entry: Entry,
    entries: int | None,
) -> PackedPrompts:
    """Lay out a part of each request, one after another.

    Arguments:
    - `entries`: pages that are read, at most, where a part does not begin at its prompt's first token; `None`
      where all do.
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
        first, end = key_ranges(config, 0, part.stop)
        k_start[rows], k_end[rows] = base + first[part.start :], base + end[part.start :]
        pages = pool.pages_of(request.id)[part.start // PAGE_ROWS : pages_of(part.stop)]
        filled.append(Filled(pages, np.arange(rows.start, rows.stop)[None, None], positions[rows]))
    whole = [i for i, part in enumerate(parts) if part.stop == requests[i].known]
    order = np.array(sorted(whole, key=lambda i: evaluated_apart(requests[i].sampling)), np.int64)
    row = starts[1:][order] - 1
    batch = Batch(
        tokens,
        Rows(positions, k_start, k_end),
        head_rows(row, row, order, entry),
        segment_params(requests, entry, config),
    )
    # As many as there are segments: the number of entries that are compiled for depends on it.
    nothing = np.zeros((1, 1, 0), np.int64)
    filled += [Filled(tokens[:0], nothing, tokens[:0])] * (entry.segments - len(filled))
    storage = storage_of(filled, entry.rows)
    plain, penalty = _plain([requests[i] for i in order]), _penalty(requests, entry, config)
    return PackedPrompts(batch, storage, keys, plain, penalty, order)


def pages_read(request: CausalRequest, config: ModelConfig, steps: int) -> range:
    """Which of its pages a request reads or writes while it generates up to so many tokens."""
    last = request.known + min(steps, request.steps_left) - 1
    seen = int(window_start(config, request.known, 0))
    return range(seen // PAGE_ROWS, pages_of(last))


def pack_sequences(
    requests: Sequence[CausalRequest], config: ModelConfig, pool: PageBook, entry: Entry, entries: int
) -> PackedSequences:
    """List what each request reads while it generates up to `entry.steps` tokens.

    Arguments:
    - `entries`: of the page table.

    No tokens are left from parts before; who runs the part puts them in, and has them on the device.
    """
    order = np.array(
        sorted(range(len(requests)), key=lambda i: evaluated_apart(requests[i].sampling)), np.int64
    )
    ordered, size = [requests[i] for i in order], entry.segments
    read = [pages_read(request, config, entry.steps) for request in ordered]
    held = [pool.pages_of(request.id) for request in ordered]
    first = np.cumsum([0, *(len(part) + 1 for part in read)])  # one more, of fresh rows
    pages, before = (
        padded(np.concatenate(x).astype(np.int32), entries)
        for x in (
            [
                np.append(own[part.start : part.stop], ~i)
                for i, (own, part) in enumerate(zip(held, read, strict=True))
            ],
            [np.append(PAGE_ROWS * np.array(part), 0) for part in read],
        )
    )
    reached = np.arange(pages_of(entry.steps) + 1)
    current = [(request.known - 1) // PAGE_ROWS + reached for request in ordered]
    following = [own[np.minimum(at, len(own) - 1)] for own, at in zip(held, current, strict=True)]
    most = power_bucket(max(len(request.device_stop_ids) for request in ordered), _STOPS)
    stop_ids = [padded(np.array(r.device_stop_ids, np.int32), most, -1) for r in ordered]
    sequences = Sequences(
        padded(np.array([r.tokens[r.known - 1] for r in ordered], np.int32), size),
        padded(np.array([r.known for r in ordered], np.int32), size),
        padded(np.stack(stop_ids), size),
        segment_params(ordered, entry, config),
        _plain(ordered),
        np.zeros(MAX_SEGMENTS, np.int32),
        padded(np.array([-1 if r.awaited is None else r.awaited.first for r in ordered], np.int32), size, -1),
    )
    reads = Reads(
        pages,
        before,
        padded(first.astype(np.int32), size + 1, int(first[-1])),
        padded(np.stack(following).astype(np.int32), size),
    )
    return PackedSequences(sequences, reads, _penalty(ordered, entry, config), order)


def next_of(
    request: CausalRequest, config: ModelConfig, entry: Entry
) -> tuple[SegmentParams, np.ndarray, Penalty | None]:
    """What the next token of one request needs: `segments`, `plain` and `penalty`."""
    return segment_params([request], entry, config), _plain([request]), _penalty([request], entry, config)


def _plain(requests: Sequence[CausalRequest]) -> np.ndarray:
    return np.array(sum(not evaluated_apart(request.sampling) for request in requests), np.int32)


def penalised(requests: Sequence[CausalRequest]) -> bool:
    """Whether any of them has a penalty."""
    return any(penalties_of(request.sampling) for request in requests)


def has_words(segments: SegmentParams) -> bool:
    """Whether any of them bans words of several tokens."""
    return segments.control is not None and segments.control.words is not None


def _penalty(requests: Sequence[CausalRequest], entry: Entry, config: ModelConfig) -> Penalty | None:
    if not penalised(requests):
        return None
    size = entry.segments
    occurrences = np.zeros((size, config.vocab_size), np.int32)
    for segment, request in enumerate(requests):
        generated = request.tokens[len(request.prompt) : request.known]
        occurrences[segment, request.tokens[: request.known]] = 1
        occurrences[segment] += np.bincount(generated, minlength=config.vocab_size)
    columns = (
        padded(np.array([getattr(request.sampling, name) for request in requests], np.float32), size, nothing)
        for name, nothing in PENALTIES.items()
    )
    return Penalty(occurrences, *columns)


def usual_entries(rows: int) -> int:
    """Pages that parts read in all, of an engine with steps of so many rows, where none begins far behind."""
    return pages_of(rows) + PAGE_ROWS
