"""How the product of rows and vocabulary is cut for the kernel."""

import dataclasses
import math

from jaxtyping import Array, Int

from jdllm.noise import LANES
from jdllm.pallas.hopper import (
    PROCESSORS,
    SHARED_BYTES,
    STRIP,
    SWIZZLE_COLUMNS,
    WARPGROUP_ROWS,
    consumer_registers,
)

Index = Int[Array, "..."] | int

DEPTH = SWIZZLE_COLUMNS
"""Hidden dimensions per pipeline stage."""

MAX_COLUMNS = 256
"""Columns of the widest tile: the widest product that one warpgroup can ask for."""

LOADER_REGISTERS = 24

CHUNK = WARPGROUP_ROWS
"""Tiles of ids that are merged at a time: an operand's number of rows, whose layout in registers this is."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The cut of one launch.

    A warpgroup multiplies 64 rows with `columns` vocabulary ids. A block has `row_groups` x `column_groups`
    of them, a cluster `row_blocks` x `column_blocks` blocks. Blocks of a cluster that need the same tile of
    an operand load it once between them.

    - `columns`: multiple of 16, at most `MAX_COLUMNS`.
    - `stages`: pairs of operand tiles in flight.
    - `processors`: how many blocks run at once.

    The ids of a tile are not consecutive. Noise draws two words per counter, for ids that differ in bit 7
    (`jdllm.noise.vocabulary_bits`): a tile has `columns / 2` consecutive counters and both ids of
    each, first those of the first word.

    Raises `NotImplementedError` for cuts whose parts are no whole blocks of 8 rows of shared memory, or that
    do not fit into it.
    """

    columns: int
    row_groups: int
    column_groups: int
    row_blocks: int
    column_blocks: int
    stages: int
    processors: int = PROCESSORS

    def __post_init__(self):
        if not 0 < self.columns <= MAX_COLUMNS or self.columns % (2 * STRIP):
            raise NotImplementedError(f"a tile has a multiple of 16 columns, at most 256, not {self.columns}")
        for shared in (self.run / self.row_blocks, self.block_rows / self.column_blocks):
            if shared % STRIP:
                raise NotImplementedError(f"a block loads multiples of {STRIP} rows, not {shared}")
        if self.stages * self.stage_bytes > SHARED_BYTES:
            raise NotImplementedError(
                f"{self.stages} stages of {self.stage_bytes} bytes exceed the {SHARED_BYTES} of shared memory"
            )

    @property
    def pairs(self) -> int:
        """Counters of a tile."""
        return self.columns // 2

    @property
    def run(self) -> int:
        """How many of a tile's ids are consecutive for sure, whichever tile it is."""
        return math.gcd(self.pairs, LANES)

    @property
    def consumers(self) -> int:
        """Warpgroups of a block that multiply; one more loads."""
        return self.row_groups * self.column_groups

    @property
    def consumer_registers(self) -> int:
        return consumer_registers(self.consumers, LOADER_REGISTERS)

    @property
    def block_rows(self) -> int:
        return self.row_groups * WARPGROUP_ROWS

    @property
    def block_columns(self) -> int:
        return self.column_groups * self.columns

    @property
    def clusters(self) -> int:
        return self.processors // (self.row_blocks * self.column_blocks)

    @property
    def stage_bytes(self) -> int:
        return (self.block_rows + self.block_columns) * DEPTH * 2

    def padded_rows(self, rows: int) -> int:
        """`rows`, rounded up to what clusters write."""
        unit = self.block_rows * self.row_blocks
        return -(-rows // unit) * unit

    def column_units(self, vocab: int) -> int:
        """How many clusters side by side cover the vocabulary."""
        counters = -(-vocab // (2 * LANES)) * LANES
        return -(-counters // (self.pairs * self.column_groups * self.column_blocks))

    def splits(self, vocab: int) -> int:
        """Into how many tiles the vocabulary is cut."""
        return self.column_units(vocab) * self.column_groups * self.column_blocks

    def split_of(self, ids: Index) -> Index:
        """The tile of an id; no tile for -1."""
        return counter_of(ids) // self.pairs

    def counter(self, split: Index, column: Index) -> Index:
        """The counter of a column in the first half of tile `split`."""
        return split * self.pairs + column

    def first_id(self, split: Index, column: int) -> Index:
        """The id of a column; the ids of `run` columns from a multiple of it on are consecutive."""
        return id_of(self.counter(split, column % self.pairs), column // self.pairs)


def padded_splits(splits: int) -> int:
    """`splits`, rounded up to what is merged at a time."""
    return -(-splits // CHUNK) * CHUNK


def counter_of(ids: Index) -> Index:
    """The counter from which the noise of an id is drawn: the id without bit 7."""
    return ((ids >> 8) << 7) + (ids & (LANES - 1))


def id_of(counter: Index, word: int) -> Index:
    """The id that takes `word` of `counter`."""
    return counter + (counter & -LANES) + word * LANES


def default_tiles(rows: int) -> Tiles:
    """The cut for a chunk of `rows` rows.

    Few rows are a matter of streaming the head, so that one warpgroup per block and many bytes in flight do.
    From 128 rows on, a block takes 128 of them; beyond 256, two blocks share the tiles of the head.
    """
    if rows <= WARPGROUP_ROWS:
        return Tiles(192, row_groups=1, column_groups=1, row_blocks=1, column_blocks=1, stages=7)
    if rows <= 2 * WARPGROUP_ROWS:
        return Tiles(192, row_groups=2, column_groups=1, row_blocks=1, column_blocks=2, stages=5)
    row_blocks = 1 if rows <= 4 * WARPGROUP_ROWS else 2
    return Tiles(MAX_COLUMNS, row_groups=2, column_groups=1, row_blocks=row_blocks, column_blocks=1, stages=4)
