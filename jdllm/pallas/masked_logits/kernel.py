"""The Hopper kernel of masked logits, in Pallas for Mosaic GPU.

One warpgroup of a block loads tiles of both operands by TMA into a ring of stages; the others multiply
(wgmma) and reduce each finished tile of logits in registers. What leaves a tile are a few numbers per row.
Blocks are persistent: a cluster walks over tiles until all rows and ids are done. Row blocks are the inner
axis, so that clusters that run at the same time read the same part of the head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.masked_logits.reduction import Logits, Moments, Partials, reduce_tile
from jdllm.pallas.masked_logits.row_table import Field, RowFields, RowTable
from jdllm.pallas.masked_logits.tiles import DEPTH, LOADER_REGISTERS, Tiles, padded_splits
from jdllm.pallas.masked_logits.types import Level
from jdllm.pallas.ring import COMPILER_PARAMS, drain, free_barriers, in_roles, pass_on, swizzled
from jdllm.pallas.shared_lowering import lowered_once

Scalar = Int[Array, ""]


class _Ring(NamedTuple):
    """Operand tiles in shared memory, and the barriers that say when a stage is full and when it is free."""

    hidden: Any
    head: Any
    full: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What every warpgroup knows before it starts."""

    tiles: Tiles
    level: Level
    vocab: int
    steps: int
    token_bans: int
    penalised: bool

    def stage(self, step: Scalar) -> Scalar:
        return lax.rem(step, jnp.int32(self.tiles.stages))

    def for_each_unit(self, count: Scalar, visit: Callable[[Scalar, Scalar, Scalar], None]) -> Scalar:
        """Call `visit(first step, first row, first split)` for this block's part of each unit of its cluster.

        Returns the number of steps of all units.
        """
        tiles = self.tiles
        rows = tiles.block_rows * tiles.row_blocks
        row_units = lax.div(count + (rows - 1), jnp.int32(rows))
        units = row_units * tiles.column_units(self.vocab)
        cluster = lax.axis_index("cluster")
        mine = lax.div(units - cluster + (tiles.clusters - 1), jnp.int32(tiles.clusters))

        def body(i: Scalar, _: None) -> None:
            unit = cluster + i * tiles.clusters
            row = lax.rem(unit, row_units) * tiles.row_blocks + lax.axis_index("row_block")
            column = lax.div(unit, row_units) * tiles.column_blocks + lax.axis_index("column_block")
            visit(i * self.steps, row * tiles.block_rows, column * tiles.column_groups)

        lax.fori_loop(0, mine, body, None)
        return mine * self.steps


@lowered_once("token_bans", "tiles", "level")
def head_partials(
    hidden: Float[Array, "rows d"],
    head: Float[Array, "vocab d"],
    count: Scalar,
    table: RowTable,
    token_bans: int,
    tiles: Tiles,
    level: Level,
) -> tuple[Partials, Moments | None]:
    """Multiply the first `count` rows with the head and reduce each tile of logits.

    Arguments:
    - `hidden`, `head`: bfloat16 or float16; rows and vocabulary multiples of 8, `d` of 64.
    - `count`: tiles of rows from here on are skipped.
    - `table`: how the rows are drawn, made for `tiles`; `token_bans` is the number of bans of the token.
    - `tiles`: the cut.
    - `level`: below `Level.FILTERED`.
    """
    vocab, depth = head.shape
    launch = _Launch(tiles, level, vocab, depth // DEPTH, token_bans, table.occurrences is not None)
    shape = (padded_splits(tiles.splits(vocab)), tiles.padded_rows(hidden.shape[0]))
    fields = Partials._fields + Moments._fields * (level >= Level.MOMENTS)
    dtypes = [jnp.int32 if field == "token" else jnp.float32 for field in fields]
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=[jax.ShapeDtypeStruct(shape, d) for d in dtypes],
        scratch_types=_ring(tiles, hidden.dtype),
        grid=(tiles.clusters,),
        grid_names=("cluster",),
        cluster=(tiles.row_blocks, tiles.column_blocks),
        cluster_names=("row_block", "column_block"),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="masked_logits",
    )
    results = kernel(hidden, head, count.reshape(1), *jax.tree.leaves(table))
    moments = results[len(Partials._fields) :]
    return Partials(*results[: len(Partials._fields)]), Moments(*moments) if moments else None


def _ring(tiles: Tiles, dtype: jnp.dtype) -> list[Any]:
    copies = 1 + tiles.column_groups * (tiles.columns // tiles.run)
    cluster, axes = (tiles.row_blocks, tiles.column_blocks), ("row_block", "column_block")
    return list(
        _Ring(
            hidden=swizzled((tiles.stages, tiles.block_rows, DEPTH), dtype),
            head=swizzled((tiles.stages, tiles.block_columns, DEPTH), dtype),
            full=plgpu.Barrier(num_arrivals=copies, num_barriers=tiles.stages),
            free=free_barriers(tiles.stages, tiles.consumers, cluster, axes),
        )
    )


def _kernel(hidden, head, count_ref, words, marks, *refs, launch: _Launch) -> None:
    occurrences, *refs = refs if launch.penalised else (None, *refs)
    out, ring = refs[: -len(_Ring._fields)], _Ring(*refs[-len(_Ring._fields) :])
    tiles, count = launch.tiles, count_ref[0]
    in_roles(
        tiles.consumers,
        (LOADER_REGISTERS, tiles.consumer_registers),
        lambda: _load(hidden, head, ring, count, launch),
        lambda: _consume(ring, RowTable(words, marks, occurrences), out, count, launch),
    )


def _load(hidden, head, ring: _Ring, count: Scalar, launch: _Launch) -> None:
    """Fill the ring's stages, each as soon as it is free."""
    tiles = launch.tiles

    def visit(first_step: Scalar, row: Scalar, split: Scalar) -> None:
        def step(k: Scalar, _: None) -> None:
            stage = launch.stage(first_step + k)
            full = ring.full.at[stage]
            pl.when(first_step + k >= tiles.stages)(lambda: plgpu.barrier_wait(ring.free.at[stage]))
            depth = pl.ds(k * DEPTH, DEPTH)
            rows = hidden.at[pl.ds(row, tiles.block_rows), depth]
            plgpu.copy_gmem_to_smem(rows, ring.hidden.at[stage], full, collective_axes="column_block")
            for group in range(tiles.column_groups):
                for column in range(0, tiles.columns, tiles.run):
                    ids = head.at[pl.ds(tiles.first_id(split + group, column), tiles.run), depth]
                    to = ring.head.at[stage, pl.ds(group * tiles.columns + column, tiles.run)]
                    plgpu.copy_gmem_to_smem(ids, to, full, collective_axes="row_block")

        lax.fori_loop(0, launch.steps, step, None)

    steps = launch.for_each_unit(count, visit)
    drain(steps, tiles.stages, ring.free)


def _consume(ring: _Ring, table: RowTable, out: Sequence[Any], count: Scalar, launch: _Launch) -> None:
    """Multiply and reduce this warpgroup's tile of every unit."""
    tiles = launch.tiles
    warpgroup = lax.axis_index("warpgroup")
    row_group = lax.div(warpgroup, jnp.int32(tiles.column_groups))
    column_group = lax.rem(warpgroup, jnp.int32(tiles.column_groups))

    def visit(first_step: Scalar, block_row: Scalar, block_split: Scalar) -> None:
        row = block_row + row_group * WARPGROUP_ROWS
        split = block_split + column_group

        def decide() -> None:
            rows = RowFields(table, row, launch.token_bans)
            # These arrive while the products are computed.
            mark = table.marks[split, lax.div(row, jnp.int32(WARPGROUP_ROWS))]
            scale = math.log2(math.e) / rows.floats(Field.DIVISOR)
            logits = _multiply(ring, first_step, row_group, column_group, launch)
            results = reduce_tile(logits, split, mark, scale, rows, tiles, launch.level)
            for ref, result in zip(out, results, strict=True):
                ref[split, pl.ds(row, WARPGROUP_ROWS)] = result

        lax.cond(row < count, decide, lambda: _skip(ring, first_step, launch))

    launch.for_each_unit(count, visit)


def _multiply(
    ring: _Ring, first_step: Scalar, row_group: Scalar, column_group: Scalar, launch: _Launch
) -> Logits:
    """Logits of a tile: its products over all stages."""
    tiles = launch.tiles
    rows = pl.ds(row_group * WARPGROUP_ROWS, WARPGROUP_ROWS)
    columns = pl.ds(column_group * tiles.columns, tiles.columns)

    def accumulate(accumulator) -> Logits:
        def issue(k: Scalar | int) -> None:
            stage = launch.stage(first_step + k)
            plgpu.barrier_wait(ring.full.at[stage])
            ids = ring.head.at[stage, columns].transpose((1, 0))
            plgpu.wgmma(accumulator, ring.hidden.at[stage, rows], ids)

        def release(k: Scalar | int) -> None:
            plgpu.barrier_arrive(ring.free.at[launch.stage(first_step + k)])

        def step(k: Scalar, _: None) -> None:
            issue(k)
            plgpu.wgmma_wait(1)  # the one before is done, this one keeps the tensor cores busy
            release(k - 1)

        issue(0)
        lax.fori_loop(1, launch.steps, step, None)
        logits = accumulator[...]
        release(launch.steps - 1)
        return logits

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, tiles.columns)))


def _skip(ring: _Ring, first_step: Scalar, launch: _Launch) -> None:
    """Pass on the stages of a tile of rows that are not live."""

    def step(k: Scalar, _: None) -> None:
        stage = launch.stage(first_step + k)
        pass_on(ring.full.at[stage], ring.free.at[stage])

    lax.fori_loop(0, launch.steps, step, None)
