"""How the queries and the cached keys are cut for the kernel."""

import dataclasses

from jdllm.pallas.hopper import PROCESSORS, WARPGROUP_ROWS, consumer_registers

TILE = 64
"""Keys that are loaded by one copy."""

MAX_ROWS = 512
"""Folded rows of one pair of request and key-value head."""

_LOADER_REGISTERS = 40
_REGISTERS_BESIDE = (104, 88)
"""Of a thread that loads and of one that widens, where the pool has 8 bits. Steps are short then, so those
that multiply leave enough for a loader that copies queries in many short runs."""

_MAX_CONSUMERS = 2  # queries, scores and outputs of a warpgroup stay in registers


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The cut of one launch.

    Workers are clusters of `row_blocks` blocks. All blocks of a worker take the same keys, each for its own
    `row_groups` x 64 folded rows.

    - `row_groups`: warpgroups of a block that take 64 rows each.
    - `row_blocks`: blocks of a cluster; each loads its part of the keys for all of them.
    - `key_groups`: warpgroups with the same rows that take turns at steps.
    - `step_tiles`: tiles of 64 keys of one step, 1 or 2.
    - `stages`: steps in flight.
    - `stored_stages`: steps in flight as a pool in 8 bits stores them; 0 for other pools.
    - `min_tiles`: workers stay idle rather than take less.
    - `processors`: how many blocks run at once.

    Raises `NotImplementedError` for cuts that a block has no registers for.
    """

    row_groups: int = 1
    row_blocks: int = 1
    key_groups: int = 1
    step_tiles: int = 1
    stages: int = 6
    stored_stages: int = 0
    min_tiles: int = 2
    processors: int = PROCESSORS

    def __post_init__(self):
        if self.consumers > _MAX_CONSUMERS:
            raise NotImplementedError(f"a block has at most {_MAX_CONSUMERS} consumers, not {self.consumers}")
        if self.step_tiles not in (1, 2):
            raise NotImplementedError(f"a step has 1 or 2 tiles, not {self.step_tiles}")
        if self.stages % self.key_groups:
            raise NotImplementedError(f"{self.key_groups} key groups cannot share {self.stages} stages")

    @property
    def consumers(self) -> int:
        """Warpgroups of a block that multiply; one more loads, and one may widen."""
        return self.row_groups * self.key_groups

    @property
    def registers(self) -> tuple[int, ...] | None:
        """What a thread asks for that loads, that multiplies, and that widens. `None` where a single
        warpgroup multiplies, which has enough: asking would take all that the processor has."""
        if self.consumers == 1:
            return None
        loader, *others = _REGISTERS_BESIDE if self.stored_stages else (_LOADER_REGISTERS,)
        return loader, consumer_registers(self.consumers, loader, *others), *others

    @property
    def workers(self) -> int:
        return self.processors // self.row_blocks

    @property
    def block_rows(self) -> int:
        return self.row_groups * WARPGROUP_ROWS

    @property
    def rows(self) -> int:
        """Folded rows that a worker takes."""
        return self.block_rows * self.row_blocks

    @property
    def step_keys(self) -> int:
        return self.step_tiles * TILE

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of the queries and of all stages, in 16-bit types, and of stages in 8 bits."""
        wide = 2 * head_dim * (self.block_rows + 2 * self.stages * self.step_keys)
        return wide + 2 * (head_dim + 2) * self.stored_stages * self.step_keys


def default_tiles(rows: int, head_dim: int, in_8_bits: bool = False) -> Tiles:
    """The cut for `rows` folded rows.

    Arguments:
    - `in_8_bits`: how the pool stores keys and values.

    Up to 64 rows are a matter of streaming keys: small steps keep most bytes in flight. Beyond, products
    count too: two warpgroups alternate between the tensor cores and the softmax, and beyond 128 rows two
    or four blocks share what they load.
    """
    more = 128 // head_dim
    row_groups = 1 if rows <= WARPGROUP_ROWS else 2
    row_blocks = 1 if rows <= 128 else 2 if rows <= 256 else 4
    if in_8_bits:
        return Tiles(row_groups, row_blocks, stages=3 * more, stored_stages=(7 - row_groups) * more)
    if row_groups == 1:
        return Tiles(stages=6 * more)
    return Tiles(row_groups, row_blocks, step_tiles=2, stages=3 * more)
