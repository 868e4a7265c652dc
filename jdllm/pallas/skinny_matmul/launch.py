"""What every warpgroup of the kernel of products of a few rows knows before it starts."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.skinny_matmul.tiles import (
    COLUMN_UNIT,
    NARROW,
    Tiles,
    blocks_of,
    depth_of,
    product_columns,
    stage_columns,
    summed_columns,
)
from jdllm.quantised import SHIFTED_GROUP

Scalar = Int[Array, ""]

_HALF = WARPGROUP_ROWS // 2

GROUPS = depth_of(NARROW) // SHIFTED_GROUP
"""Of a stage, each with a scale and an offset."""


class Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that say when a stage is full and when it is free.

    - `together`: at these the warpgroups that multiply wait for one another.
    """

    ring: Any
    full: Any
    free: Any
    together: Any

    @property
    def x(self) -> Any:
        """Rows of all stages, one below the other."""
        (x, *_), _ = self.ring
        return x

    @property
    def weights(self) -> Any:
        """Columns of all stages, one below the other."""
        (_, weights, *_), _ = self.ring
        return weights

    @property
    def scales(self) -> Any:
        """The same columns' scales of groups; with offsets, rows of a run's scales, then of its offsets."""
        (_, _, scales), _ = self.ring
        return scales

    @property
    def sums(self) -> Any:
        """In the place of the ring, which is done with by then."""
        _, sums = self.ring
        return sums


@dataclasses.dataclass(frozen=True)
class Launch:
    """What every warpgroup knows before it starts."""

    tiles: Tiles
    rows: int
    steps: int
    outputs: tuple[int, ...]
    gated: bool
    biased: bool
    pairs: int | None
    chained: bool

    @property
    def blocks(self) -> list[int]:
        """How many blocks each weight takes."""
        return blocks_of(self.outputs, self.tiles.columns, self.gated)

    def stage(self, step: Scalar | int) -> Scalar:
        return lax.rem(jnp.int32(step), jnp.int32(self.tiles.stages))

    def own_steps(self) -> tuple[Scalar, Scalar]:
        """The first step of this block and their number."""
        begin, end = (self.tiles.first_step(lax.axis_index("split") + i, self.steps) for i in range(2))
        return begin, end - begin

    @property
    def run(self) -> int:
        """How many of a block's columns are side by side."""
        return self.tiles.columns // (1 if self.pairs is None else 2)

    @property
    def stage_columns(self) -> int:
        """From one stage to the next, as many columns."""
        return stage_columns(self.tiles.columns, self.gated, self.tiles.bits)

    @property
    def summed(self) -> int:
        """How many columns of weights a stage holds."""
        return summed_columns(self.tiles.columns, self.gated)

    @property
    def all_runs(self) -> int:
        """Runs of columns that a stage holds."""
        return self.summed // self.run

    @property
    def copies(self) -> int:
        """How many copies fill a stage: of the rows, and of each run of columns, its scales and offsets."""
        return 1 + self.all_runs * (1 + self.tiles.grouped + self.tiles.shifted)

    def first_group(self, stage: Scalar, run: Scalar | int) -> Scalar:
        """The first row of the scales of a stage's run of columns; the rows of its offsets follow."""
        return (stage * self.all_runs + run) * 2 * GROUPS

    def halves(self, shared: Shared, stage: Scalar, first: Scalar) -> list[Any]:
        """Scales and offsets of 64 columns of a stage, of one half after the other.

        A half is of one run. Behind the last column a half may be of any others: nobody reads its sums.
        """

        def half(begin: int) -> Any:
            run, place = (f(first + begin, jnp.int32(self.run)) for f in (lax.div, lax.rem))
            rows = self.first_group(stage, jnp.minimum(run, self.all_runs - 1))
            return shared.scales.at[pl.ds(rows, 2 * GROUPS), pl.ds(place, _HALF)]

        return [half(begin) for begin in (0, _HALF)]

    @property
    def product(self) -> int:
        """How many columns the products of all warpgroups have for one stage."""
        return product_columns(self.summed)

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.tiles.consumers(self.gated)

    def begins(self) -> list[Scalar | int]:
        """Where in a run of columns the strips of this warpgroup begin. There may be one too many, the last
        strip of the run once more."""
        if self.consumers == 1:
            return list(range(0, self.run, COLUMN_UNIT))
        strips, mine = self.run // COLUMN_UNIT, lax.axis_index("warpgroup")
        return [
            jnp.minimum(mine + turn, strips - 1) * COLUMN_UNIT for turn in range(0, strips, self.consumers)
        ]

    def stores(self, index: int) -> Bool[Array, ""] | bool:
        """Whether the strip of `begins` at this index is really this warpgroup's."""
        strips = self.run // COLUMN_UNIT
        whole = (index + 1) * self.consumers <= strips
        return whole or lax.axis_index("warpgroup") + index * self.consumers < strips

    @property
    def results(self) -> tuple[int, ...]:
        """Outputs of each result."""
        return self.outputs[: len(self.blocks)]

    def for_own_weight(self, visit: Callable[[int], None]) -> None:
        """Call `visit` with the index of the weight whose columns the block takes."""
        if len(self.blocks) == 1:
            return visit(0)
        for index in range(len(self.blocks)):
            pl.when(self.owns(index))(functools.partial(visit, index))

    def owns(self, index: int) -> Bool[Array, ""]:
        """Whether the block takes columns of this weight."""
        end, block = sum(self.blocks[: index + 1]), lax.axis_index("column_block")
        return (end - self.blocks[index] <= block) & (block < end)

    def before(self, sizes: Sequence[int]) -> Scalar:
        """The sum of the sizes of those weights that come before the block's own."""
        total, block = jnp.int32(0), lax.axis_index("column_block")
        for end, size in zip(itertools.accumulate(self.blocks[:-1]), sizes, strict=False):
            total += jnp.where(block >= end, size, 0)
        return total

    def runs(self) -> list[tuple[int, pl.Slice]]:
        """Runs of the block's columns: where they are among these, and where among those of the weight."""
        place = lax.axis_index("column_block") - self.before(self.blocks)
        if self.pairs is None:
            return [(0, pl.ds(place * self.run, self.run))]
        in_head = self.pairs // self.run
        first = lax.div(place, jnp.int32(in_head)) * 2 * self.pairs + self.first_pair()
        return [(i * self.run, pl.ds(first + i * self.pairs, self.run)) for i in range(2)]

    def first_pair(self) -> Scalar:
        """Which pair of its head the block begins with."""
        assert self.pairs is not None
        return lax.rem(lax.axis_index("column_block"), jnp.int32(self.pairs // self.run)) * self.run
