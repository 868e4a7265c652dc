"""The Hopper kernel of grouped products with matrices in few bits, in Pallas for Mosaic GPU.

One warpgroup of a block loads tiles of all operands by TMA into a ring of stages. The others widen weights in
registers, and multiply from there (wgmma). Weights are the left operand: a warpgroup takes 64 columns of each
matrix. The rows of a unit are the right operand. Blocks are persistent. Columns are the inner axis, so that
clusters that run at the same time read the same rows and the matrices of few groups.
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
from jdllm.pallas.grouped_matmul.types import Product, X
from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.products import Widening
from jdllm.pallas.quantised_matmul.tiles import CHUNK, DEPTH, LOADER_REGISTERS, Tiles
from jdllm.pallas.ring import COMPILER_PARAMS, drain, free_barriers, in_roles, swizzled
from jdllm.pallas.shared_lowering import lowered_once
from jdllm.quantised import GROUP, Grouped, Quantised

Scalar = Int[Array, ""]
Sums = Float[Array, "64 rows"]

_STEPS = GROUP // DEPTH  # of one group of inputs


class _Matrix(NamedTuple):
    """The stack of one operand, in memory or in shared memory.

    - `scales`: in shared memory those of all stages, one after the other, where groups of inputs have scales.
    """

    values: Any
    scales: Any


class _Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that say when a stage is full and when it is free."""

    x: Any
    matrices: Sequence[_Matrix]
    leaving: Any
    full: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What every warpgroup knows before it starts.

    - `grouped`: whether groups of inputs have scales.
    """

    tiles: Tiles
    steps: int
    column_clusters: int
    grouped: bool

    @property
    def clusters(self) -> int:
        """How many of them run."""
        return self.tiles.processors // self.tiles.cluster

    def stage(self, step: Scalar) -> Scalar:
        return lax.rem(step, jnp.int32(self.tiles.stages))

    def for_each_tile(self, units: RowUnits, visit: Callable[[Scalar, Unit, Scalar], None]) -> Scalar:
        """Call `visit(first step, unit, first column)` for the tiles of this block.

        Returns the number of steps of all its tiles.
        """
        cluster, tiles, along = lax.axis_index("cluster"), self.tiles, jnp.int32(self.column_clusters)
        all_tiles = units.ends[units.ends.shape[0] - 1] * along
        mine = lax.div(all_tiles - cluster + (self.clusters - 1), jnp.int32(self.clusters))

        def body(i: Scalar, _: None) -> None:
            tile = cluster + i * self.clusters
            block = lax.rem(tile, along) * tiles.cluster + lax.axis_index("block")
            visit(i * self.steps, units.at(lax.div(tile, along)), block * tiles.columns)

        lax.fori_loop(0, mine, body, None)
        return mine * self.steps


@lowered_once("rows", "tiles", "products")
def few_bits_products(
    x: X, matrices: Sequence[Quantised], units: RowUnits, rows: int, tiles: Tiles, products: Widening
) -> Product:
    """Multiply each unit's rows with its matrix.

    Arguments:
    - `x`: bfloat16 or float16, a multiple of 8 rows and of 128 columns.
    - `matrices`: the weights, or gates and weights; their outputs are a multiple of the columns of a cluster.
    - `units`: made for `tiles`.
    - `rows`: how many rows the result has.
    - `tiles`: the cut.
    - `products`: how weights are multiplied.
    """
    _, n, k = matrices[0].shape
    launch = _Launch(
        tiles, k // DEPTH, n // (tiles.cluster * tiles.columns), isinstance(matrices[0], Grouped)
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch, products=products),
        out_type=jax.ShapeDtypeStruct((rows, n), x.dtype),
        scratch_types=_shared(launch, x.dtype, matrices[0].values.dtype),
        grid=(launch.clusters,),
        grid_names=("cluster",),
        cluster=(tiles.cluster,),
        cluster_names=("block",),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="few_bits_gated_matmul" if tiles.matrices > 1 else "few_bits_grouped_matmul",
    )
    return kernel(x, *(part for matrix in matrices for part in (matrix.values, matrix.scales)), *units)


def _shared(launch: _Launch, dtype: jnp.dtype, values_dtype: jnp.dtype) -> list[Any]:
    tiles = launch.tiles
    of_matrix = (
        swizzled((tiles.stages, tiles.columns, tiles.weight_bytes), values_dtype),
        plgpu.SMEM((tiles.stages * tiles.columns,), dtype=jnp.float32),
    )
    copies = 1 + tiles.matrices * (2 if launch.grouped else 1)
    return [
        swizzled((tiles.stages, tiles.rows, DEPTH), dtype),
        *of_matrix * tiles.matrices,
        # Parts of it leave row by row.
        swizzled((tiles.consumers, tiles.slots, CHUNK, WARPGROUP_ROWS), dtype, strip=1),
        plgpu.Barrier(num_arrivals=copies, num_barriers=tiles.stages),
        free_barriers(tiles.stages, tiles.consumers, (tiles.cluster,), ("block",)),
    ]


def _kernel(x, *refs, launch: _Launch, products: Widening) -> None:
    tiles, refs = launch.tiles, list(refs)

    def pop(count: int) -> list[Any]:
        return [refs.pop(0) for _ in range(count)]

    matrices = [_Matrix(*pop(2)) for _ in range(tiles.matrices)]
    units, out = RowUnits(*pop(len(RowUnits._fields))), refs.pop(0)
    shared = _Shared(refs.pop(0), [_Matrix(*pop(2)) for _ in range(tiles.matrices)], *refs)
    in_roles(
        tiles.consumers,
        (LOADER_REGISTERS, tiles.registers),
        lambda: _load(x, matrices, shared, units, launch),
        lambda: _consume(matrices, shared, units, out, launch, products),
    )


def _load(x: Any, matrices: Sequence[_Matrix], shared: _Shared, units: RowUnits, launch: _Launch) -> None:
    """Fill the ring's stages, each as soon as it is free."""
    tiles = launch.tiles

    def visit(first_step: Scalar, unit: Unit, column: Scalar) -> None:
        rows, columns = pl.ds(unit.row, tiles.rows), pl.ds(column, tiles.columns)

        def step(k: Scalar, _: None) -> None:
            stage = launch.stage(first_step + k)
            full = shared.full.at[stage]
            pl.when(first_step + k >= tiles.stages)(lambda: plgpu.barrier_wait(shared.free.at[stage]))
            depth = pl.ds(k * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(x.at[rows, depth], shared.x.at[stage], full, collective_axes="block")
            for matrix, ring in zip(matrices, shared.matrices, strict=True):
                depth = pl.ds(k * tiles.weight_bytes, tiles.weight_bytes)
                plgpu.copy_gmem_to_smem(
                    matrix.values.at[unit.matrix, columns, depth], ring.values.at[stage], full
                )
                if launch.grouped:
                    to = ring.scales.at[pl.ds(stage * tiles.columns, tiles.columns)]
                    group = lax.div(k, jnp.int32(_STEPS))
                    plgpu.copy_gmem_to_smem(matrix.scales.at[unit.matrix, group, columns], to, full)

        lax.fori_loop(0, launch.steps, step, None)

    drain(launch.for_each_tile(units, visit), tiles.stages, shared.free)


def _consume(
    matrices: Sequence[_Matrix],
    shared: _Shared,
    units: RowUnits,
    out: Any,
    launch: _Launch,
    products: Widening,
) -> None:
    """Multiply and store this warpgroup's columns of every tile."""
    tiles, warpgroup = launch.tiles, lax.axis_index("warpgroup")
    first = warpgroup * WARPGROUP_ROWS

    def visit(first_step: Scalar, unit: Unit, block_column: Scalar) -> None:
        def step(k: Scalar, sums: Sequence[Sums]) -> Sequence[Sums]:
            stage = launch.stage(first_step + k)
            plgpu.barrier_wait(shared.full.at[stage])
            added = [
                add(ring, of_matrix, stage) for ring, of_matrix in zip(shared.matrices, sums, strict=True)
            ]
            plgpu.barrier_arrive(shared.free.at[stage])
            return added

        zeros = [products.zeros((WARPGROUP_ROWS, tiles.rows))] * tiles.matrices
        sums = lax.fori_loop(0, launch.steps, step, zeros)
        columns = pl.ds(block_column + first, WARPGROUP_ROWS)
        if not launch.grouped:
            scales = (matrix.scales.at[unit.matrix, columns] for matrix in matrices)
            sums = [products.scaled(of_matrix, own) for of_matrix, own in zip(sums, scales, strict=True)]
        _store([x.astype(out.dtype) for x in sums], unit, columns, shared.leaving.at[warpgroup], out, tiles)

    def add(ring: _Matrix, sums: Sums, stage: Scalar) -> Sums:
        weights = ring.values.at[stage, pl.ds(first, WARPGROUP_ROWS)]
        if not launch.grouped:
            return products.add_product(sums, weights, shared.x.at[stage])
        of_group = ring.scales.at[pl.ds(stage * tiles.columns + first, WARPGROUP_ROWS)]
        return products.add_product_of_scaled(sums, weights, of_group, shared.x.at[stage])

    launch.for_each_tile(units, visit)
    plgpu.wait_smem_to_gmem(0)


def _store(sums: Sequence[Sums], unit: Unit, columns: pl.Slice, leaving: Any, out: Any, tiles: Tiles) -> None:
    """Finish the sums of 64 columns and write the rows of the unit, turned round, chunk by chunk."""
    for chunk in range(tiles.rows // CHUNK):
        row, slot = unit.row + chunk * CHUNK, leaving.at[chunk % tiles.slots]
        begin, end = jnp.maximum(unit.first - row, 0), jnp.minimum(unit.last - row, CHUNK)
        parts = [x[:, chunk * CHUNK : (chunk + 1) * CHUNK] for x in sums]

        def store(slot=slot, row=row, begin=begin, end=end, parts=parts) -> None:
            finished = parts[0] if len(parts) == 1 else gated(*parts)
            slot.transpose((1, 0))[...] = plgpu.layout_cast(finished, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            send_rows(slot, out, row, columns, begin, end)

        # All chunks are groups of copies, also those without rows: so slots take turns.
        plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
        pl.when(begin < end)(store)
        plgpu.commit_smem_to_gmem_group()
