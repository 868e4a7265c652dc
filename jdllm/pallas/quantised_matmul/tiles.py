"""How products with matrices in few bits are cut for the Hopper kernel."""

import dataclasses
import itertools
import math

from jdllm.pallas.hopper import (
    PROCESSORS,
    SHARED_BYTES,
    SWIZZLE_COLUMNS,
    WARPGROUP_ROWS,
    consumer_registers,
)
from jdllm.quantised import SHIFTED_GROUP

DEPTH = SWIZZLE_COLUMNS
"""Inputs per pipeline stage."""

CHUNK = WARPGROUP_ROWS
"""Rows that leave together."""

LOADER_REGISTERS = 24

BLOCK_ROWS = (256, 192, 128, 64)
"""Of a block, times its matrices: a warpgroup can hold the sums of so many at most."""

CONSUMERS = (2, 1)
"""Warpgroups of a block that multiply."""

CLUSTERS = (2, 1)
"""Blocks of a cluster."""

_MOST_STAGES = 8

# Cycles, as far as they tell one cut from another.
_PRODUCTS = 2048  # of a row, a column and an input, that a processor adds up in a cycle
_LOADED = 24  # bytes a cycle that a processor gets, where all of them load
_STORED = 3000  # from the last product of a tile to the first one of the next


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The cut of one launch.

    A warpgroup multiplies 64 columns of each matrix with all rows of a block. Blocks of a cluster have the
    same rows, and load them once between them.

    - `rows`: of a block; times `matrices` of `BLOCK_ROWS`.
    - `consumers`: warpgroups of a block that multiply, of `CONSUMERS`. One more loads.
    - `cluster`: blocks of a cluster, of `CLUSTERS`.
    - `bits`: of a weight.
    - `processors`: how many blocks run at once.
    - `matrices`: that rows are multiplied with, 1 or 2.
    - `shifted`: whether groups of inputs have offsets.

    Raises `NotImplementedError` for cuts outside of the kernel's limits.
    """

    rows: int
    consumers: int
    cluster: int
    bits: int
    processors: int = PROCESSORS
    matrices: int = 1
    shifted: bool = False

    def __post_init__(self):
        given = self.rows, self.consumers, self.cluster
        all_rows = tuple(rows // self.matrices for rows in BLOCK_ROWS if rows % (self.matrices * CHUNK) == 0)
        if any(one not in some for one, some in zip(given, (all_rows, CONSUMERS, CLUSTERS), strict=True)):
            raise NotImplementedError(
                f"a block has {all_rows} rows and {CONSUMERS} warpgroups that multiply, and a cluster"
                f" {CLUSTERS} blocks, not {given}"
            )

    @property
    def columns(self) -> int:
        """Of a block."""
        return self.consumers * WARPGROUP_ROWS

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        return consumer_registers(self.consumers, LOADER_REGISTERS)

    @property
    def weight_bytes(self) -> int:
        """Of a column in one stage."""
        return DEPTH * self.bits // 8

    @property
    def slots(self) -> int:
        """Chunks of a warpgroup that may be on their way out at once. All tiles begin with the first slot."""
        return math.gcd(2, self.rows // CHUNK)

    @property
    def stages(self) -> int:
        """Tiles of all operands in flight: as many as there is room for."""
        column = self.weight_bytes + (4 * DEPTH // SHIFTED_GROUP if self.shifted else 4)
        stage = self.rows * DEPTH * 2 + self.matrices * self.columns * column
        leaving = self.consumers * self.slots * CHUNK * WARPGROUP_ROWS * 2
        return min((SHARED_BYTES - leaving) // stage, _MOST_STAGES)

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """How many blocks of rows and clusters of columns make up a product.

        Raises `NotImplementedError` for a product that is not made up of whole ones.
        """
        wide = self.cluster * self.columns
        if rows % self.rows or columns % wide:
            raise NotImplementedError(
                f"blocks of {self.rows} rows and clusters of {wide} columns do not make up {rows}"
                f" and {columns}"
            )
        return rows // self.rows, columns // wide

    def cycles(self, rows: int, columns: int, depth: int) -> float:
        """About how long a product takes, to compare cuts."""
        row_blocks, clusters = -(-rows // self.rows), columns // (self.cluster * self.columns)
        turns = -(-row_blocks * clusters * self.cluster // self.processors)
        outputs = self.matrices * self.columns
        product = self.rows * outputs * DEPTH / _PRODUCTS
        loaded = (self.rows * DEPTH * 2 / self.cluster + outputs * self.weight_bytes) / _LOADED
        return turns * (depth // DEPTH * max(product, loaded) + _STORED)


def default_tiles(
    rows: int,
    columns: int,
    depth: int,
    bits: int,
    *,
    groups: int = 1,
    matrices: int = 1,
    shifted: bool = False,
) -> Tiles:
    """The cut that is expected to take the least time; of several the one with the most rows a block.

    Arguments:
    - `rows`: of all groups.
    - `columns`, `depth`: outputs and inputs of each matrix.
    - `groups`: of rows, taken to be alike. No block has rows of two of them.
    """
    found = (
        Tiles(of_block // matrices, consumers, cluster, bits, matrices=matrices, shifted=shifted)
        for of_block, consumers, cluster in itertools.product(BLOCK_ROWS, CONSUMERS, CLUSTERS)
        if columns % (consumers * cluster * WARPGROUP_ROWS) == 0 and of_block % (matrices * CHUNK) == 0
    )
    used = min(groups, rows)

    def cycles(tiles: Tiles) -> float:
        in_blocks = -(-rows // (used * tiles.rows)) * tiles.rows
        return tiles.cycles(used * in_blocks, columns, depth)

    return min(found, key=cycles)
