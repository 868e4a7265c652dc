"""How the queries and the cached keys are cut for the kernel."""

import dataclasses

from jdllm.pallas.hopper import PROCESSORS, WARPGROUP_ROWS, consumer_registers

TILE = 64
"""Keys that are loaded by one copy."""

MAX_ROWS = 512
"""Folded rows of one pair of request and key-value head."""

LOADER_REGISTERS = 40

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
    - `min_tiles`: workers stay idle rather than take less.
    - `processors`: how many blocks run at once.

    Raises `NotImplementedError` for cuts that a block has no registers for.
    """

    row_groups: int = 1
    row_blocks: int = 1
    key_groups: int = 1
    step_tiles: int = 1
    stages: int = 6
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
        """Warpgroups of a block that multiply; one more loads."""
        return self.row_groups * self.key_groups

    @property
    def consumer_registers(self) -> int:
        """What each thread of several consumers asks for."""
        return consumer_registers(self.consumers, LOADER_REGISTERS)

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
        """Shared memory of the queries and of all stages, in 16-bit types."""
        return 2 * head_dim * (self.block_rows + 2 * self.stages * self.step_keys)


def default_tiles(rows: int, head_dim: int) -> Tiles:
    """The cut for `rows` folded rows.

    Up to 64 rows are a matter of streaming keys: small steps keep most bytes in flight. Beyond, products
    count too: two warpgroups alternate between the tensor cores and the softmax, and beyond 128 rows two
    or four blocks share what they load.
    """
    more = 128 // head_dim
    if rows <= WARPGROUP_ROWS:
        return Tiles(stages=6 * more)
    row_blocks = 1 if rows <= 128 else 2 if rows <= 256 else 4
    return Tiles(row_groups=2, row_blocks=row_blocks, step_tiles=2, stages=3 * more)
