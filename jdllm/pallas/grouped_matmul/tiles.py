"""How grouped products are cut for the Hopper kernel."""

import dataclasses

WARPGROUP_ROWS = 64
DEPTH = 64
"""Inputs per pipeline stage: 128 bytes, the widest swizzle."""

CHUNK = 64
"""Columns that leave together: 128 bytes as well."""

STRIP = 8
"""Rows of a swizzled block in shared memory; copies of `x` start at multiples of it."""

PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200."""

SHARED_BYTES = 224 * 1024
"""Shared memory of a block that tiles may take; 3 KiB more hold barriers."""

LOADER_REGISTERS = 24

_THREADS = 128  # of a warpgroup
_REGISTERS = 65536  # of a processor
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
        """What a thread of a consumer may have while one of the loader has `LOADER_REGISTERS`.

        A block starts with the same number for every thread, a multiple of 8 as any. Warpgroups can pass on
        only what these make together: who asks for more waits forever.
        """
        warpgroups = self.consumers + 1
        initial = min(_REGISTERS // (warpgroups * _THREADS) // 8 * 8, 256)
        return min((warpgroups * initial - LOADER_REGISTERS) // self.consumers // 8 * 8, 240)

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
