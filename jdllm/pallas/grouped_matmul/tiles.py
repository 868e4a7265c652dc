"""How grouped products are cut for the Hopper kernel."""

import dataclasses

from jdllm.pallas.hopper import PROCESSORS, SHARED_BYTES, SWIZZLE_COLUMNS, WARPGROUP_ROWS, consumer_registers

DEPTH = SWIZZLE_COLUMNS
"""Inputs per pipeline stage."""

CHUNK = SWIZZLE_COLUMNS
"""Columns that leave together."""

LOADER_REGISTERS = 24

_ACCUMULATED = 256  # columns, of all matrices, whose sums a warpgroup can hold


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The cut of one launch.

    A warpgroup multiplies 64 rows with `columns` columns of each matrix. A block has `row_groups` x
    `column_groups` of them, a cluster `row_blocks` x `column_blocks` blocks. Blocks of a cluster that need
    the same tile of an operand load it once between them.

    - `matrices`: 1, or 2 for a gated product, whose gate and up tiles have the same columns.
    - `columns`: 64, 128 or 256; all matrices together at most 256.
    - `stages`: tiles of all operands in flight.
    - `processors`: how many blocks run at once.

    Raises `NotImplementedError` for cuts whose parts are no whole blocks of shared memory, or that do not
    fit into it.
    """

    matrices: int
    columns: int
    row_groups: int
    column_groups: int
    row_blocks: int
    column_blocks: int
    stages: int
    processors: int = PROCESSORS

    def __post_init__(self):
        if self.columns not in (64, 128, 256) or self.matrices * self.columns > _ACCUMULATED:
            raise NotImplementedError(
                f"a warpgroup has 64, 128 or 256 columns, at most {_ACCUMULATED} of all matrices, "
                f"not {self.columns} of {self.matrices}"
            )
        if self.block_columns > 256 or self.block_rows > 256:
            raise NotImplementedError(
                f"a block loads at most 256 rows and columns, not {self.block_rows} and {self.block_columns}"
            )
        if self.shared_bytes > SHARED_BYTES:
            raise NotImplementedError(
                f"tiles of {self.shared_bytes} bytes exceed the {SHARED_BYTES} of shared memory"
            )

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
    def unit_rows(self) -> int:
        """Rows of a cluster, all of one group."""
        return self.row_blocks * self.block_rows

    @property
    def unit_columns(self) -> int:
        return self.column_blocks * self.block_columns

    @property
    def clusters(self) -> int:
        return self.processors // (self.row_blocks * self.column_blocks)

    @property
    def chunks(self) -> int:
        return self.columns // CHUNK

    @property
    def slots(self) -> int:
        """Chunks of a warpgroup that may be on their way out at once."""
        return min(2, self.chunks)

    @property
    def shared_bytes(self) -> int:
        stage = (self.block_rows + self.matrices * self.block_columns) * DEPTH * 2
        return self.stages * stage + self.consumers * self.slots * WARPGROUP_ROWS * CHUNK * 2


def default_tiles(n: int, matrices: int) -> Tiles:
    """The cut for matrices with `n` columns, a multiple of 64: as wide as the sums' registers allow."""
    columns = next(c for c in (256, 128, 64) if n % c == 0 and c * matrices <= _ACCUMULATED)
    return Tiles(matrices, columns, row_groups=2, column_groups=1, row_blocks=1, column_blocks=1, stages=4)
