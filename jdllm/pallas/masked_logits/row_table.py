"""What the kernels must know of each row, as one array of 32-bit words."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from jdllm.arrays import Tensor
from jdllm.pallas.hopper import STRIP, WARPGROUP_ROWS
from jdllm.pallas.masked_logits.tiles import Index, Tiles, counter_of, id_of
from jdllm.pallas.masked_logits.types import RowPenalty, RowSampling


class Mark(enum.IntFlag):
    """What a warpgroup's rows need in a tile beyond the plain reduction.

    - `REMOVED`: some row has a ban or its limit among the tile's ids.
    - `NOISE`: some row has a temperature.
    """

    REMOVED = 1
    NOISE = 2


class Field(enum.IntEnum):
    """Lines of the table of words; `COUNTER` is the first counter of the noise. From `BANS` on, bans of the
    token, then bans of the confidence."""

    KEY_0 = 0
    KEY_1 = 1
    POSITION = 2
    LIMIT = 3
    TEMPERATURE = 4
    DIVISOR = 5
    REPETITION = 6
    PRESENCE = 7
    FREQUENCY = 8
    COUNTER = 9
    BANS = 10


class RowTable(NamedTuple):
    """The rows of one launch; inside the kernel, references to them.

    - `words`: a line for each `Field`.
    - `marks`: for each tile of ids and each 64 rows the `Mark`s.
    - `occurrences`: of each row, as `RowPenalty` counts them, for the ids of all tiles; `None` where no row
      has a penalty.
    """

    words: Int[Array, "fields padded_rows"]
    marks: Int[Array, "splits groups"]
    occurrences: Int[Array, "padded_rows padded_vocab"] | None


def row_table(rows: RowSampling, count: Int[Array, ""], vocab: int, tiles: Tiles) -> RowTable:
    """Gather what the kernel needs; rows from `count` on, and those added as padding, ask for nothing."""
    number = len(rows.positions)
    padding = (0, tiles.padded_rows(number) - number)
    live = jnp.arange(number) < count

    def padded(line: Any, neutral: float = 0) -> Array:
        return jnp.pad(jnp.where(live, line, neutral), padding, constant_values=neutral)

    limit = padded(jnp.minimum(jnp.asarray(rows.limit), vocab), vocab)
    temperature = padded(jnp.asarray(rows.temperature, jnp.float32))
    divisor = padded(rows.divisor, 1)
    bans = [padded(ban, -1) for ban in (*rows.token_bans.T, *rows.confidence_bans.T)]
    keyed = map(padded, (*rows.keys, rows.positions))
    penalties, occurrences = [jnp.zeros_like(temperature)] * 3, None
    if rows.penalty is not None:
        penalties = [padded(jnp.asarray(x, jnp.float32), neutral) for x, neutral in _penalties(rows.penalty)]
        ids = id_of(tiles.splits(vocab) * tiles.pairs - 1, 1) + 1
        occurrences = jnp.asarray(rows.penalty.occurrences, jnp.int32)[rows.penalty.sequence]
        occurrences = jnp.pad(occurrences, (padding, (0, ids - vocab)))
    counter = padded(0 if rows.first_id is None else counter_of(jnp.asarray(rows.first_id)))
    lines = (*keyed, limit, temperature, divisor, *penalties, counter, *bans)
    words = jnp.stack([_as_int(line) for line in lines])
    return RowTable(words, _marks(limit, temperature, bans, vocab, tiles), occurrences)


def _penalties(penalty: RowPenalty) -> list[tuple[Float[Tensor, " rows"], float]]:
    """The lines from `Field.REPETITION` on, each with what changes nothing."""
    return [(penalty.repetition, 1), (penalty.presence, 0), (penalty.frequency, 0)]


def _marks(
    limit: Int[Array, " padded_rows"],
    temperature: Float[Array, " padded_rows"],
    bans: Sequence[Int[Array, " padded_rows"]],
    vocab: int,
    tiles: Tiles,
) -> Int[Array, "splits groups"]:
    limits, temperatures, *bans = (line.reshape(-1, WARPGROUP_ROWS) for line in (limit, temperature, *bans))
    splits = jnp.arange(tiles.splits(vocab))[:, None, None]
    removed = jnp.asarray(id_of(tiles.counter(splits, tiles.pairs - 1), 1)) >= limits
    for ban in bans:
        removed |= tiles.split_of(ban) == splits
    marks = jnp.where(removed, int(Mark.REMOVED), 0) | jnp.where(temperatures > 0, int(Mark.NOISE), 0)
    return jnp.bitwise_or.reduce(marks, axis=-1)


def _as_int(line: Any) -> Int[Array, " rows"]:
    line = jnp.asarray(line)
    return line if line.dtype == jnp.int32 else lax.bitcast_convert_type(line, jnp.int32)


class RowFields:
    """The fields of a warpgroup's rows, read inside the kernel."""

    def __init__(self, table: RowTable, first: Int[Array, ""], token_bans: int):
        self._words: Any = table.words
        self._occurrences: Any = table.occurrences
        self._rows = pl.ds(first, WARPGROUP_ROWS)
        self.penalised = table.occurrences is not None
        self.token_bans = range(Field.BANS, Field.BANS + token_bans)
        self.confidence_bans = range(self.token_bans.stop, table.words.shape[0])

    def integers(self, line: Int[Array, ""] | int) -> Int[Array, " warpgroup_rows"]:
        line_of_rows = self._words.at[line, self._rows]
        return plgpu.load(line_of_rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def occurrences(self, first_id: Index) -> Int[Array, "warpgroup_rows strip"]:
        """Of the ids of a strip, where rows are `penalised`."""
        of_strip = self._occurrences.at[self._rows, pl.ds(first_id, STRIP)]
        return plgpu.load(of_strip, layout=plgpu.Layout.WGMMA, optimized=False)

    def words(self, field: Field) -> UInt32[Array, " warpgroup_rows"]:
        return self.integers(field).astype(jnp.uint32)

    def floats(self, field: Field) -> Float[Array, " warpgroup_rows"]:
        return lax.bitcast_convert_type(self.integers(field), jnp.float32)
