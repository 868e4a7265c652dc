"""The Hopper kernel of grouped products, in Pallas for Mosaic GPU.

One warpgroup of a block loads tiles of all operands by TMA into a ring of stages; the others multiply
(wgmma). A finished tile stays in registers, rounded, until the first products of the next one are on their
way: what is left to compute and its store (TMA) then cost no time. Blocks are persistent: a cluster walks
over tiles until all rows and columns are done. Columns are the inner axis, so that clusters that run at the
same time read the same rows and the matrices of few groups.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jdllm.pallas.gating import gated
from jdllm.pallas.grouped_matmul.row_units import RowUnits, Unit
from jdllm.pallas.grouped_matmul.sending import send_rows
from jdllm.pallas.grouped_matmul.tiles import CHUNK, DEPTH, LOADER_REGISTERS, Tiles
from jdllm.pallas.grouped_matmul.types import Plain, Product, X
from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.ring import COMPILER_PARAMS, drain, free_barriers, in_roles, pass_on, swizzled
from jdllm.pallas.shared_lowering import lowered_once

Scalar = Int[Array, ""]
Tile = Float[Array, "64 columns"]


class _Leaving(NamedTuple):
    """A warpgroup's products with each matrix, rounded; rows outside of `[begin, end)` are not its own."""

    products: tuple[Tile, ...]
    row: Scalar
    column: Scalar
    begin: Scalar
    end: Scalar


class _Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that say when a stage is full and when it is free."""

    x: Any
    matrices: Sequence[Any]
    leaving: Any
    full: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What every warpgroup knows before it starts."""

    tiles: Tiles
    steps: int
    columns: int

    def stage(self, step: Scalar) -> Scalar:
        return lax.rem(step, jnp.int32(self.tiles.stages))

    def for_each_tile[T](
        self, units: RowUnits, visit: Callable[[Scalar, Unit, Scalar, T], T], state: T
    ) -> tuple[Scalar, T]:
        """Call `visit(first step, unit, first column, state)` for this block's part of its cluster's tiles.

        The unit of the next tile is read ahead: the read takes as long as several steps.

        Returns the number of steps of all tiles, and the last state.
        """
        tiles = self.tiles
        per_unit = jnp.int32(self.columns // tiles.unit_columns)
        cluster = lax.axis_index("cluster")
        count = units.ends[units.ends.shape[0] - 1]
        mine = lax.div(count * per_unit - cluster + (tiles.clusters - 1), jnp.int32(tiles.clusters))

        def read(i: Scalar | int) -> Unit:
            index = lax.div(cluster + i * tiles.clusters, per_unit)
            return units.at(jnp.minimum(index, units.matrix.shape[0] - 1))

        def body(i: Scalar, carry: tuple[Unit, T]) -> tuple[Unit, T]:
            (unit, state), following = carry, read(i + 1)
            column = lax.rem(cluster + i * tiles.clusters, per_unit) * tiles.unit_columns
            column += lax.axis_index("column_block") * tiles.block_columns
            row = unit.row + lax.axis_index("row_block") * tiles.block_rows
            return following, visit(i * self.steps, unit._replace(row=row), column, state)

        _, state = lax.fori_loop(0, mine, body, (read(0), state))
        return mine * self.steps, state


@lowered_once("rows", "tiles")
def unit_products(x: X, matrices: Sequence[Plain], units: RowUnits, rows: int, tiles: Tiles) -> Product:
    """Multiply each unit's rows with its matrix.

    Arguments:
    - `x`: bfloat16 or float16, a multiple of 8 rows and of 64 columns.
    - `matrices`: the weights, or gates and weights; `n` a multiple of the columns of a cluster.
    - `units`: made for `tiles`.
    - `rows`: how many rows the result has.
    - `tiles`: the cut.
    """
    _, depth, columns = matrices[0].shape
    launch = _Launch(tiles, depth // DEPTH, columns)
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        scratch_types=_shared(tiles, x.dtype),
        grid=(tiles.clusters,),
        grid_names=("cluster",),
        cluster=(tiles.row_blocks, tiles.column_blocks),
        cluster_names=("row_block", "column_block"),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="gated_matmul" if tiles.matrices > 1 else "grouped_matmul",
    )
    return kernel(x, *matrices, *units)


def _shared(tiles: Tiles, dtype: jnp.dtype) -> list[Any]:
    cluster, axes = (tiles.row_blocks, tiles.column_blocks), ("row_block", "column_block")
    return [
        swizzled((tiles.stages, tiles.block_rows, DEPTH), dtype),
        *[swizzled((tiles.stages, DEPTH, tiles.block_columns), dtype)] * tiles.matrices,
        # Parts of it leave row by row.
        swizzled((tiles.consumers, tiles.slots, WARPGROUP_ROWS, CHUNK), dtype, strip=1),
        plgpu.Barrier(num_arrivals=1 + tiles.matrices, num_barriers=tiles.stages),
        free_barriers(tiles.stages, tiles.consumers, cluster, axes),
    ]


def _kernel(x, *refs, launch: _Launch) -> None:
    tiles = launch.tiles
    refs = list(refs)
    matrices = [refs.pop(0) for _ in range(tiles.matrices)]
    units = RowUnits(*(refs.pop(0) for _ in RowUnits._fields))
    out, ring_x, *ring_matrices, leaving, full, free = refs
    shared = _Shared(ring_x, ring_matrices, leaving, full, free)
    in_roles(
        tiles.consumers,
        (LOADER_REGISTERS, tiles.consumer_registers),
        lambda: _load(x, matrices, shared, units, launch),
        lambda: _consume(shared, units, out, launch),
    )


def _load(x, matrices: Sequence[Any], shared: _Shared, units: RowUnits, launch: _Launch) -> None:
    """Fill the ring's stages, each as soon as it is free."""
    tiles = launch.tiles

    def visit(first_step: Scalar, unit: Unit, column: Scalar, _: None) -> None:
        rows, columns = pl.ds(unit.row, tiles.block_rows), pl.ds(column, tiles.block_columns)

        def step(k: Scalar, _: None) -> None:
            stage = launch.stage(first_step + k)
            full, depth = shared.full.at[stage], pl.ds(k * DEPTH, DEPTH)
            pl.when(first_step + k >= tiles.stages)(lambda: plgpu.barrier_wait(shared.free.at[stage]))
            plgpu.copy_gmem_to_smem(
                x.at[rows, depth], shared.x.at[stage], full, collective_axes="column_block"
            )
            for matrix, ring in zip(matrices, shared.matrices, strict=True):
                plgpu.copy_gmem_to_smem(
                    matrix.at[unit.matrix, depth, columns], ring.at[stage], full, collective_axes="row_block"
                )

        lax.fori_loop(0, launch.steps, step, None)

    steps, _ = launch.for_each_tile(units, visit, None)
    drain(steps, tiles.stages, shared.free)


def _consume(shared: _Shared, units: RowUnits, out, launch: _Launch) -> None:
    """Multiply and store this warpgroup's part of every tile."""
    tiles = launch.tiles
    warpgroup = lax.axis_index("warpgroup")
    row_group = lax.div(warpgroup, jnp.int32(tiles.column_groups))
    column_group = lax.rem(warpgroup, jnp.int32(tiles.column_groups))

    store = functools.partial(_store, shared=shared.leaving.at[warpgroup], out=out, tiles=tiles)
    rows = pl.ds(row_group * WARPGROUP_ROWS, WARPGROUP_ROWS)
    columns = pl.ds(column_group * tiles.columns, tiles.columns)

    def visit(first_step: Scalar, unit: Unit, block_column: Scalar, leaving: _Leaving) -> _Leaving:
        row = unit.row + row_group * WARPGROUP_ROWS
        column = block_column + column_group * tiles.columns
        begin = jnp.maximum(unit.first - row, 0)
        end = jnp.minimum(unit.last - row, WARPGROUP_ROWS)

        def multiply() -> _Leaving:
            sums = _multiply(shared, rows, columns, first_step, launch, lambda: store(leaving))
            return _Leaving(tuple(x.astype(out.dtype) for x in sums), row, column, begin, end)

        def skip() -> _Leaving:
            _skip(shared, first_step, launch)
            return leaving

        return lax.cond(begin < end, multiply, skip)

    zero = jnp.int32(0)
    nothing = jnp.zeros((WARPGROUP_ROWS, tiles.columns), out.dtype)
    nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
    leaving = _Leaving((nothing,) * tiles.matrices, zero, zero, zero, zero)
    _, leaving = launch.for_each_tile(units, visit, leaving)
    store(leaving)
    plgpu.wait_smem_to_gmem(0)


def _multiply(
    shared: _Shared,
    rows: Any,
    columns: Any,
    first_step: Scalar,
    launch: _Launch,
    meanwhile: Callable[[], None],
) -> list[Tile]:
    """The products of a warpgroup's rows with its columns of each matrix, in f32.

    `meanwhile` is called while the tensor cores have the first step.
    """

    def accumulate(*accumulators: Any) -> list[Tile]:
        def issue(k: Scalar | int) -> None:
            stage = launch.stage(first_step + k)
            plgpu.barrier_wait(shared.full.at[stage])
            for accumulator, ring in zip(accumulators, shared.matrices, strict=True):
                plgpu.wgmma(accumulator, shared.x.at[stage, rows], ring.at[stage, :, columns])

        def release(k: Scalar | int) -> None:
            plgpu.barrier_arrive(shared.free.at[launch.stage(first_step + k)])

        def step(k: Scalar, _: None) -> None:
            issue(k)
            plgpu.wgmma_wait(launch.tiles.matrices)  # of the steps, only this one is still under way
            release(k - 1)

        # Products are issued before those of the step before have ended; a stage is free a step later. Rows
        # of other units are multiplied too: they change no other row, and `_store` leaves them out.
        issue(0)
        meanwhile()
        lax.fori_loop(1, launch.steps, step, None)
        sums = [accumulator[...] for accumulator in accumulators]
        release(launch.steps - 1)
        return sums

    accumulator = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, launch.tiles.columns))
    return pl.run_scoped(accumulate, *[accumulator] * launch.tiles.matrices)


def _skip(shared: _Shared, first_step: Scalar, launch: _Launch) -> None:
    """Pass on the stages of a tile none of whose rows this warpgroup has."""

    def step(k: Scalar, _: None) -> None:
        stage = launch.stage(first_step + k)
        pass_on(shared.full.at[stage], shared.free.at[stage])

    lax.fori_loop(0, launch.steps, step, None)


def _finished(products: Sequence[Tile], first: int) -> Tile:
    """The columns of a chunk from `first` on, ready to leave."""
    if len(products) == 1:
        return products[0][:, first : first + CHUNK]
    gate, up = (x[:, first : first + CHUNK] for x in products)
    return gated(gate, up)


def _store(leaving: _Leaving, shared: Any, out: Any, tiles: Tiles) -> None:
    """Finish a tile and write its rows, if it has any."""

    def store() -> None:
        for chunk in range(tiles.chunks):
            _store_chunk(leaving, chunk, shared, out, tiles)

    pl.when(leaving.begin < leaving.end)(store)


def _store_chunk(leaving: _Leaving, chunk: int, shared: Any, out: Any, tiles: Tiles) -> None:
    products, row, column, begin, end = leaving
    # `row` is a multiple of 8: it changes nothing, but that the compiler keeps no addresses in registers.
    slot = shared.at[lax.rem(row + chunk, jnp.int32(tiles.slots))]
    plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
    slot[...] = _finished(products, chunk * CHUNK)
    plgpu.commit_smem()
    send_rows(slot, out, row, pl.ds(column + chunk * CHUNK, CHUNK), begin, end)
    plgpu.commit_smem_to_gmem_group()
