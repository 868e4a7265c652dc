"""The compiled sizes of an engine: a fixed ladder, so that a compiled executable serves every request."""

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.planning.buckets import head_bucket, power_bucket, row_bucket, steps_per_dispatch

TILE_ROWS = 32
"""Rows of a usual tile, which read the pool together; the rows of a request are padded to a multiple."""

MAX_SEGMENTS = 64
"""Requests of one part of an iteration."""

SHIFTED_TILE_ROWS = 40
"""Rows of a tile where a block forwards the row before it too, since logits are shifted: room for a usual
block and this row, in whole units of the kernels."""

_UNIT_ROWS = 8
_SHORT_BLOCKS = (2, 4)
"""Kernels take rows in whole units of so many."""

_MOST_TILES = 64
"""Tiles of the largest step of rows that reuse. Of short tiles there are as many as have the same rows."""

_UNIT = 128
_BOUND = 512
"""Rows below which a step takes about as long as one of half as many: the weights are read anyway."""

_LARGE = 8192
"""Rows from which on a step of twice as many takes twice as long."""

_MOST_DEFAULT = 36864
_MOST_EXECUTABLES = 99

_BOUND_TILES = 2
_QUARTERS = range(_BOUND, 4096)
"""Rows of refreshes, four sizes to a doubling: under load most of the device's time goes there."""

_EIGHTHS = range(1024, 4096)
"""Rows of refreshes, eight sizes to a doubling: a refresh of one or two requests."""

_TILES = (*range(1, 16), *range(16, 24, 2), 24, 28, 32, 40, 48, _MOST_TILES, 96, 128, 192, 256)
"""Tiles of single steps that reuse: under load half of the device's time goes there. Short ones go on."""

_SMALL = 2048
"""Rows up to which a refresh may have as many head rows: an eighth of them may be less than a block."""

_BETWEEN = 1.5
"""What sizes of many rows differ by at most."""

_WIDE = 2
_DECODED, _DECODE_STEPS = (1, 8, 16, 32, MAX_SEGMENTS), 16
_WIDE_PARTS = 512
"""Rows from which on parts of as many prompts as there are requests share a step."""

_PATIENCE = 1 << 18
"""Rows of padding that take an 8B model on an H200 about as long as compiling a step."""

_WORTH_COMPILING = 1 << 11
"""Rows of padding, some hundredths of a second there, after which a step is compiled in the background."""


class Entry(NamedTuple):
    """The sizes of one executable.

    - `rows`: packed rows, padding included.
    - `head_rows`: rows that meet the head. A guided one counts twice.
    - `segments`: requests.
    - `steps`: denoising steps of a dispatch at most.
    """

    rows: int
    head_rows: int
    segments: int
    steps: int

    def holds(self, rows: int, head_rows: int, segments: int) -> bool:
        return rows <= self.rows and head_rows <= self.head_rows and segments <= self.segments


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The entries of each kind of step, by rising rows.

    - `full`: whole sequences; some entries have as many head rows as rows, the others few. Of a ladder that
      would have more than 99 executables, sizes above 8192 rows are left out: requests that share nothing
      are as quick in turn.
    - `refresh`: whole sequences whose keys and values are stored, one step each; `refresh_any`: the same for
      any requests, where the head ranks a whole vocabulary or blocks are long, in fewer sizes.
    - `reuse`: rows in tiles of `tile_rows`, several steps in a loop; `single`: one step of such rows without
      a loop, in more sizes; `ranked`: such rows where the head ranks a whole vocabulary, in a loop and in
      fewer sizes.
    - `tile_rows`: rows that read the pool together.
    """

    full: tuple[Entry, ...]
    refresh: tuple[Entry, ...]
    refresh_any: tuple[Entry, ...]
    reuse: tuple[Entry, ...]
    single: tuple[Entry, ...]
    ranked: tuple[Entry, ...]
    tile_rows: int

    @property
    def head_rows(self) -> int:
        """Head rows that requests share in one step; one alone may have more."""
        few = [entry.head_rows for entry in self.refresh if entry.head_rows < entry.rows]
        return max(few, default=self.refresh[-1].head_rows)

    def shared_rows(self, max_num_batched_tokens: int) -> int:
        """Rows of whole sequences that share one step, in an engine whose steps have at most so many."""
        return min(max_num_batched_tokens, self.full[-1].rows)

    @property
    def tiles(self) -> int:
        """Tiles of the largest step of rows that reuse."""
        return self.reuse[-1].rows // self.tile_rows


def make_ladder(max_num_batched_tokens: int, *, tile_rows: int = TILE_ROWS) -> Ladder:
    """The ladder of an engine whose steps have at most so many packed rows.

    Its largest refresh holds exactly these, in whole tiles. Longer sequences run in entries of their own
    (`Sizes`). Entries have numbers of rows and head rows in common, so that they have kernels in common
    (`jdllm.pallas.shared_lowering`).

    Arguments:
    - `tile_rows`: rows that read the pool together.
    """
    sizes = _sizes(max_num_batched_tokens)
    between = [*_between(4, _QUARTERS, sizes[-1]), *_between(8, _EIGHTHS, sizes[-1])]
    refresh, refresh_any = _refreshes(sorted({*sizes, *between})), _refreshes(sizes)
    largest = _MOST_TILES * max(1, TILE_ROWS // tile_rows)
    most = min(largest, -(-max_num_batched_tokens // tile_rows))
    reuse, ranked = (
        _reuses(tiles, tile_rows) for tiles in (_tiles(most, _BOUND_TILES), _tiles(most, largest))
    )
    single = _reuses([tiles for tiles in _TILES if tiles * tile_rows <= reuse[-1].rows], tile_rows)
    single = [entry._replace(steps=1) for entry in single]
    left = _MOST_EXECUTABLES - sum(map(len, (refresh, refresh_any, reuse, single, ranked)))
    sizes = sizes[: max(left - _WIDE, sum(rows <= _LARGE for rows in sizes))]
    some = sorted({sizes[len(sizes) // 2], sizes[-1]})
    wide = _for_many([_entry(rows, rows) for rows in some])
    full = sorted({*_narrow(sizes), *wide})
    return Ladder(*map(tuple, (full, refresh, refresh_any, reuse, single, ranked)), tile_rows=tile_rows)


def denoising_tile_rows(*, shifted: bool) -> int:
    """Rows of a tile of a model that sees all tokens, and whose logits are shifted or not."""
    return SHIFTED_TILE_ROWS if shifted else TILE_ROWS


def block_tile_rows(block_length: int) -> int:
    """Rows of a tile that a block of a block model fills: of short blocks, no more than the kernels need."""
    return min(max(block_length, _UNIT_ROWS), TILE_ROWS)


def short_tile_rows(block_length: int, tile_rows: int) -> int:
    """Rows of a tile where nothing needs tiles of eight: blocks of two and of four fill tiles of their own.

    Arguments:
    - `tile_rows`: of the ladder.
    """
    return block_length if block_length in _SHORT_BLOCKS else tile_rows


@dataclasses.dataclass(frozen=True)
class CausalLadder:
    """The entries of a causal model, by rising rows.

    - `prefill`: parts of prompts, of which one row each meets the head.
    - `decode`: one row of each request.
    """

    prefill: tuple[Entry, ...]
    decode: tuple[Entry, ...]


def make_causal_ladder(max_num_batched_tokens: int) -> CausalLadder:
    """The ladder of an engine of a causal model whose steps have at most so many packed rows."""
    rows = _sizes(max_num_batched_tokens)
    # Prompts may be short: what a segment costs is a page to store and a row of the head.
    segments = [MAX_SEGMENTS // 2 if size < _WIDE_PARTS else MAX_SEGMENTS for size in rows[:-1]]
    sizes = zip(rows, (*segments, MAX_SEGMENTS), strict=True)
    prefill = [Entry(size, count, count, 1) for size, count in sizes]
    decode = [Entry(size, size, size, _DECODE_STEPS) for size in _DECODED]
    return CausalLadder(tuple(prefill), tuple(decode))


def make_score_ladder(max_num_batched_tokens: int) -> tuple[Entry, ...]:
    """Sizes of evaluations that score given text, by rising rows: any of their rows may meet the head.

    Each is four times as large as the one before. A call that evaluates much fills the largest one again and
    again, and pads once.
    """
    most = _sizes(max_num_batched_tokens)[-1]
    rows = sorted({-(-(most >> shift) // _UNIT) * _UNIT for shift in (0, 2, 4, 6)})
    return tuple(Entry(size, size, 1, 1) for size in rows)


def prefill_chunk(max_num_batched_tokens: int) -> int:
    """Tokens of a prompt that one part evaluates at most: whole pages that leave room for others' tokens."""
    return max(PAGE_ROWS, (max_num_batched_tokens - MAX_SEGMENTS) // PAGE_ROWS * PAGE_ROWS)


class Sizes:
    """Which entries of one kind of step are compiled, and which of them serves a batch.

    Arguments:
    - `entries`: of the ladder, by rising rows.

    Compiling takes longer than many steps of padding, so that a compiled entry stands in for a smaller one,
    until that is compiled too.

    - `compiled`: entries that are.
    - `given_up`: sizes that cannot be compiled.
    """

    def __init__(self, entries: Sequence[Entry]):
        self._entries = entries
        self._padding: Counter[Entry] = Counter()
        self.compiled: set[Entry] = set()
        self.given_up: set[Entry] = set()

    def choose(self, rows: int, head_rows: int, segments: int, steps: int = 1) -> Entry:
        """The entry that serves a batch now, which does so many steps."""
        smallest = self._smallest(rows, head_rows, segments)
        holding = (entry for entry in self._entries if entry.holds(rows, head_rows, segments))
        entry = next((entry for entry in holding if entry in self.compiled), smallest)
        self._padding[smallest] += steps * (entry.rows - smallest.rows)
        return entry

    def missing(self, rows: int, head_rows: int, segments: int) -> Entry | None:
        """The entry that would fit such a batch, where it is not compiled and others have been padded for the
        want of it."""
        smallest = self._smallest(rows, head_rows, segments)
        worth = self._padding[smallest] >= _WORTH_COMPILING
        return smallest if worth and smallest not in self.compiled | self.given_up else None

    def _smallest(self, rows: int, head_rows: int, segments: int) -> Entry:
        """The smallest entry for a batch, compiled or not."""
        holding = (entry for entry in self._entries if entry.holds(rows, head_rows, segments))
        return next(holding, None) or self._own(rows, head_rows, segments)

    def _own(self, rows: int, head_rows: int, segments: int) -> Entry:
        """The sizes of a batch that no entry of the ladder holds."""
        own = bucket_entry(rows, head_rows, segments)
        return own._replace(steps=min(own.steps, max(entry.steps for entry in self._entries)))


class PatientSizes(Sizes):
    """`Sizes` of steps that are not compiled in the background: once an entry has padded about as long as
    compiling takes, the smaller one is chosen all the same."""

    def choose(self, rows: int, head_rows: int, segments: int, steps: int = 1) -> Entry:
        entry, smallest = (
            super().choose(rows, head_rows, segments, steps),
            self._smallest(rows, head_rows, segments),
        )
        return entry if self._padding[smallest] <= _PATIENCE else smallest


def bucket_entry(rows: int, head_rows: int, segments: int = 1) -> Entry:
    """The sizes of a batch that is on no ladder."""
    head_rows = head_bucket(head_rows)
    return Entry(row_bucket(rows), head_rows, power_bucket(segments, 8), steps_per_dispatch(head_rows))


def _entry(rows: int, head_rows: int) -> Entry:
    segments = max(8, min(rows // _UNIT, MAX_SEGMENTS))
    return Entry(rows, head_rows, segments, steps_per_dispatch(head_rows))


def _for_many(entries: list[Entry]) -> list[Entry]:
    """The entries, of which the largest holds as many requests as a part may have, however short they are."""
    return [*entries[:-1], entries[-1]._replace(segments=MAX_SEGMENTS)]


def _few(rows: int) -> int:
    """Head rows of requests that denoise a block at a time: shorter sequences have a larger share of them."""
    share = 1 if rows < 256 else 2 if rows < 512 else 4 if rows < 2048 else 8
    return head_bucket(-(-rows // share))


def _narrow(sizes: Sequence[int]) -> list[Entry]:
    return _for_many([_entry(rows, _few(rows)) for rows in sizes])


def _refreshes(sizes: Sequence[int]) -> list[Entry]:
    """Refreshes of these numbers of rows; of a small ladder, the largest also with as many head rows."""
    entries = _narrow(sizes)
    if entries[-1].head_rows < sizes[-1] <= _SMALL:
        entries += _for_many([_entry(sizes[-1], sizes[-1])])
    return [entry._replace(steps=1) for entry in entries]


def _sizes(most: int) -> list[int]:
    """Numbers of rows up to `most`, in whole units, so that a step of many is padded by a half at most.

    Large ones are halves and thirds of the largest: where that many rows are in step, so are often a half.
    """
    last = -(-most // _UNIT) * _UNIT
    large = [last]
    while large[-1] > _BETWEEN * _LARGE:
        share = (1, 2 / 3)[len(large) % 2] / 2 ** (len(large) // 2)
        large.append(math.ceil(share * last / _UNIT) * _UNIT)
    smaller = _numbers(_UNIT, _BOUND, last)
    return [*(size for size in smaller if len(large) == 1 or size <= _LARGE), *reversed(large)]


def _reuses(tiles: Sequence[int], tile_rows: int) -> list[Entry]:
    return [
        _entry(count * tile_rows, count * tile_rows)._replace(segments=max(8, min(count, MAX_SEGMENTS)))
        for count in tiles
    ]


def _tiles(most: int, bound: int) -> list[int]:
    """Numbers of tiles, of which the last is at least `most`; from `bound` on some lie halfway between."""
    sizes = _numbers(1, bound, 4 * most)
    return sizes[: bisect.bisect_left(sizes, most) + 1]


def _between(parts: int, numbers: range, last: int) -> list[int]:
    """What lies between powers of two of `numbers` and their halfways, at odd parts of each power, clearly
    below `last`.

    Arguments:
    - `parts`: of a power.
    """
    powers = (1 << i for i in range(last.bit_length()) if 1 << i in numbers)
    sizes = (part * power // parts for power in powers for part in range(parts + 1, 2 * parts, 2))
    return [size for size in sizes if size in numbers and 8 * size <= 7 * last]


def _numbers(unit: int, bound: int, last: int) -> list[int]:
    """Powers of two from `unit` on, and from `bound` on the numbers halfway between, clearly below `last`."""
    powers = [unit << i for i in range(last.bit_length())]
    between = [int(_BETWEEN * size) for size in powers if size >= bound]
    return sorted(size for size in (*powers, *between) if 8 * size <= 7 * last)


DEFAULT_ROWS = tuple(rows for rows in _sizes(_MOST_DEFAULT) if rows >= _LARGE)
"""What an account chooses the packed rows of a step from: the large sizes of the largest ladder."""
