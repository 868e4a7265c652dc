"""The Hopper kernel of products with matrices in few bits, in Pallas for Mosaic GPU.

One warpgroup of a block loads tiles of both operands by TMA into a ring of stages. The others widen weights
in registers, and multiply from there (wgmma). Weights are the left operand, of which a warpgroup takes 64
columns. Up to 256 rows are the right operand, so each weight is widened once for all rows of a block. Blocks
are persistent. Rows are the inner axis, so that clusters that run at the same time read the same weights.
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
from jaxtyping import Array, Float, Int, Int8, UInt8

from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.products import Widening
from jdllm.pallas.quantised_matmul.tiles import CHUNK, DEPTH, LOADER_REGISTERS, Tiles
from jdllm.pallas.ring import COMPILER_PARAMS, drain, free_barriers, in_roles, swizzled
from jdllm.pallas.shared_lowering import lowered_once
from jdllm.quantised import GROUP, SHIFTED_GROUP

Scalar = Int[Array, ""]
Sums = Float[Array, "64 rows"]

_STEPS = GROUP // DEPTH  # of one group of inputs with a scale
_HALF = WARPGROUP_ROWS // 2
_GROUPS = DEPTH // SHIFTED_GROUP  # of a step, with a scale and an offset


class _Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that say when a stage is full and when it is free.

    - `scales`: of all stages, one after the other, where groups of inputs have scales. Where groups have
      offsets, too, a stage has a row of scales for each group, then a row of offsets for each.
    """

    x: Any
    weights: Any
    scales: Any
    leaving: Any
    full: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What every warpgroup knows before it starts."""

    tiles: Tiles
    steps: int
    row_blocks: int
    column_clusters: int
    grouped: bool

    @property
    def clusters(self) -> int:
        """How many of them run."""
        return min(self.tiles.processors // self.tiles.cluster, self.row_blocks * self.column_clusters)

    def stage(self, step: Scalar) -> Scalar:
        return lax.rem(step, jnp.int32(self.tiles.stages))

    def for_each_tile(self, visit: Callable[[Scalar, Scalar, Scalar], None]) -> Scalar:
        """Call `visit(first step, first row, first column)` for the tiles of this block.

        Returns the number of steps of all its tiles.
        """
        cluster, tiles = lax.axis_index("cluster"), self.tiles
        all_tiles = self.row_blocks * self.column_clusters
        mine = lax.div(all_tiles - cluster + (self.clusters - 1), jnp.int32(self.clusters))

        def body(i: Scalar, _: None) -> None:
            tile, along = cluster + i * self.clusters, jnp.int32(self.row_blocks)
            block = lax.div(tile, along) * tiles.cluster + lax.axis_index("block")
            visit(i * self.steps, lax.rem(tile, along) * tiles.rows, block * tiles.columns)

        lax.fori_loop(0, mine, body, None)
        return mine * self.steps


@lowered_once("tiles", "products")
def tile_products(
    x: Float[Array, "rows k"],
    values: Int8[Array, "layers n k"] | UInt8[Array, "layers n half_k"],
    scales: Sequence[Float[Array, "layers ..."]],
    layer: Scalar,
    tiles: Tiles,
    products: Widening,
) -> Float[Array, "rows n"]:
    """Multiply rows with the layer's matrix of a stack.

    Arguments:
    - `x`: bfloat16 or float16, `k` a multiple of 128.
    - `values`: in the order of `jdllm.quantised`.
    - `scales`: f32 `[layers, n]`, or of each group of 128 inputs, `[layers, groups, n]`; or scales and then
      offsets of each group of 32 inputs, bfloat16 `[layers, groups, n]`.
    - `layer`: index of the matrix.
    - `tiles`: the cut, whose blocks make up the product.
    - `products`: how weights are multiplied.
    """
    (rows, k), n = x.shape, values.shape[1]
    launch = _Launch(tiles, k // DEPTH, *tiles.blocks(rows, n), grouped=scales[0].ndim == 3)
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch, products=products),
        out_type=jax.ShapeDtypeStruct((rows, n), x.dtype),
        scratch_types=_shared(launch, x.dtype, values.dtype),
        grid=(launch.clusters,),
        grid_names=("cluster",),
        cluster=(tiles.cluster,),
        cluster_names=("block",),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="quantised_matmul",
    )
    return kernel(x, layer.reshape(1), values, *scales)


def _shared(launch: _Launch, dtype: jnp.dtype, values_dtype: jnp.dtype) -> Sequence[Any]:
    tiles = launch.tiles
    scales = plgpu.SMEM((tiles.stages * tiles.columns,), dtype=jnp.float32)
    if tiles.shifted:
        scales = plgpu.SMEM((tiles.stages * 2 * _GROUPS, tiles.columns), dtype=jnp.bfloat16)
    return [
        swizzled((tiles.stages, tiles.rows, DEPTH), dtype),
        swizzled((tiles.stages, tiles.columns, tiles.weight_bytes), values_dtype),
        scales,
        swizzled((tiles.consumers, tiles.slots, CHUNK, WARPGROUP_ROWS), dtype),
        plgpu.Barrier(num_arrivals=2 + launch.grouped + tiles.shifted, num_barriers=tiles.stages),
        free_barriers(tiles.stages, tiles.consumers, (tiles.cluster,), ("block",)),
    ]


def _kernel(x, layer, *refs, launch: _Launch, products: Widening) -> None:
    tiles, parts = launch.tiles, 3 if launch.tiles.shifted else 2
    values, *scales = (part.at[layer[0]] for part in refs[:parts])
    out, *shared = refs[parts:]
    own = _Shared(*shared)
    in_roles(
        tiles.consumers,
        (LOADER_REGISTERS, tiles.registers),
        lambda: _load(x, values, scales, own, launch),
        lambda: _consume(scales, own, out, launch, products),
    )


def _load(x: Any, values: Any, scales: Sequence[Any], shared: _Shared, launch: _Launch) -> None:
    """Fill the ring's stages, each as soon as it is free."""
    tiles = launch.tiles

    def visit(first_step: Scalar, row: Scalar, column: Scalar) -> None:
        rows, columns = pl.ds(row, tiles.rows), pl.ds(column, tiles.columns)

        def step(k: Scalar, _: None) -> None:
            stage = launch.stage(first_step + k)
            full = shared.full.at[stage]
            pl.when(first_step + k >= tiles.stages)(lambda: plgpu.barrier_wait(shared.free.at[stage]))
            inputs = pl.ds(k * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(x.at[rows, inputs], shared.x.at[stage], full, collective_axes="block")
            inputs = pl.ds(k * tiles.weight_bytes, tiles.weight_bytes)
            plgpu.copy_gmem_to_smem(values.at[columns, inputs], shared.weights.at[stage], full)
            if tiles.shifted:
                for which, part in enumerate(scales):
                    to = shared.scales.at[pl.ds((2 * stage + which) * _GROUPS, _GROUPS)]
                    plgpu.copy_gmem_to_smem(part.at[pl.ds(k * _GROUPS, _GROUPS), columns], to, full)
            elif launch.grouped:
                to = shared.scales.at[pl.ds(stage * tiles.columns, tiles.columns)]
                plgpu.copy_gmem_to_smem(scales[0].at[lax.div(k, jnp.int32(_STEPS)), columns], to, full)

        lax.fori_loop(0, launch.steps, step, None)

    drain(launch.for_each_tile(visit), tiles.stages, shared.free)


def _consume(scales: Sequence[Any], shared: _Shared, out: Any, launch: _Launch, products: Widening) -> None:
    """Multiply and store this warpgroup's columns of every tile."""
    tiles, warpgroup = launch.tiles, lax.axis_index("warpgroup")
    first = warpgroup * WARPGROUP_ROWS

    def visit(first_step: Scalar, row: Scalar, block_column: Scalar) -> None:
        def step(k: Scalar, sums: Sums) -> Sums:
            stage = launch.stage(first_step + k)
            plgpu.barrier_wait(shared.full.at[stage])
            weights = shared.weights.at[stage, pl.ds(first, WARPGROUP_ROWS)]
            if tiles.shifted:
                groups = pl.ds(stage * 2 * _GROUPS, 2 * _GROUPS)
                halves = [shared.scales.at[groups, pl.ds(first + half, _HALF)] for half in (0, _HALF)]
                sums = products.add_product_of_shifted(sums, weights, halves, shared.x.at[stage])
            elif launch.grouped:
                of_group = shared.scales.at[pl.ds(stage * tiles.columns + first, WARPGROUP_ROWS)]
                sums = products.add_product_of_scaled(sums, weights, of_group, shared.x.at[stage])
            else:
                sums = products.add_product(sums, weights, shared.x.at[stage])
            plgpu.barrier_arrive(shared.free.at[stage])
            return sums

        sums = lax.fori_loop(0, launch.steps, step, products.zeros((WARPGROUP_ROWS, tiles.rows)))
        columns = pl.ds(block_column + first, WARPGROUP_ROWS)
        if not launch.grouped:
            sums = products.scaled(sums, scales[0].at[columns])
        _store(sums.astype(out.dtype), row, columns, shared.leaving.at[warpgroup], out, tiles)

    launch.for_each_tile(visit)
    plgpu.wait_smem_to_gmem(0)


def _store(sums: Sums, row: Scalar, columns: pl.Slice, leaving: Any, out: Any, tiles: Tiles) -> None:
    """Write the sums of 64 columns, turned round, chunk by chunk of the rows."""
    for chunk in range(tiles.rows // CHUNK):
        begin, slot = chunk * CHUNK, leaving.at[chunk % tiles.slots]
        plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
        part = plgpu.layout_cast(sums[:, begin : begin + CHUNK], plgpu.Layout.WGMMA_TRANSPOSED)
        slot.transpose((1, 0))[...] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(row + begin, CHUNK), columns])
