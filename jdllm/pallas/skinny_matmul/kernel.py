"""The Hopper kernel of products of a few rows, in Pallas for Mosaic GPU.

One warpgroup of a block streams the rows and the block's columns of every weight by TMA through a ring of
stages; the other multiplies (wgmma). A product has 64 rows: those that nothing was loaded for hold anything,
and their results do not leave. Where queries and keys are rotated, the columns of a block are two runs of one
head, so that both numbers of a pair are at hand.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jdllm.pallas.chain import let_next_start, wait_for_kernel_before
from jdllm.pallas.gating import gated
from jdllm.pallas.hopper import STRIP, SWIZZLE, WARPGROUP_ROWS
from jdllm.pallas.ring import drain, swizzled
from jdllm.pallas.skinny_matmul.tiles import DEPTH, Tiles
from jdllm.pallas.skinny_matmul.types import Rotation, Stack, X

Scalar = Int[Array, ""]
Tile = Float[Array, "64 columns"]


class _Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that say when a stage is full and when it is free."""

    x: Any
    weights: Any
    leaving: Any
    full: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What every warpgroup knows before it starts."""

    tiles: Tiles
    rows: int
    steps: int
    weights: int
    gated: bool
    pairs: int | None
    chained: bool

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

    def runs(self) -> list[tuple[int, pl.Slice]]:
        """Runs of the block's columns: where they are among these, and where among all."""
        block = lax.axis_index("column_block")
        if self.pairs is None:
            return [(0, pl.ds(block * self.run, self.run))]
        in_head = self.pairs // self.run
        first = lax.div(block, jnp.int32(in_head)) * 2 * self.pairs + self.first_pair()
        return [(i * self.run, pl.ds(first + i * self.pairs, self.run)) for i in range(2)]

    def first_pair(self) -> Scalar:
        """Which pair of its head the block begins with."""
        assert self.pairs is not None
        return lax.rem(lax.axis_index("column_block"), jnp.int32(self.pairs // self.run)) * self.run


def block_products(
    x: X,
    weights: Sequence[Stack],
    layer: Scalar,
    tiles: Tiles,
    *,
    gated: bool,
    rotation: Rotation | None,
    chained: bool,
) -> list[Float[Array, "splits rows n"]]:
    """Multiply the rows with the layer's matrix of each stack.

    Arguments:
    - `x`: bfloat16 or float16, a multiple of 8 rows, at most 64.
    - `weights`: of the dtype of `x`; `n` a multiple of 16, `k` of 64.
    - `layer`: index of the matrices.
    - `tiles`: the cut, which passed `Tiles.check`.
    - `gated`: whether the one result is silu of the first product times the second.
    - `rotation`: cosine and sine, of 64 rows each: all products but the last are rotated.
    - `chained`: as in `jdllm.pallas.chain`; all but `x` is older than the chain.

    Returns a product for each stack, or the gated one: in the dtype of `x` where the inputs are whole, else
    f32 sums of each part of them.
    """
    rows, (_, n, k) = x.shape[0], weights[0].shape
    pairs = None if rotation is None else rotation[0].shape[1]
    launch = _Launch(tiles, rows, k // DEPTH, len(weights), gated, pairs, chained)
    products = 1 if gated else len(weights)
    dtype = x.dtype if tiles.splits == 1 else jnp.dtype(jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=[jax.ShapeDtypeStruct((tiles.splits, rows, n), dtype)] * products,
        scratch_types=_shared(launch, x.dtype, products, _leaving_run(launch.run, n, dtype), dtype),
        grid=(-(-n // tiles.columns), tiles.splits),
        grid_names=("column_block", "split"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="skinny_matmul",
    )
    return kernel(x, *weights, layer.reshape(1), *(rotation or ()))


def _leaving_run(columns: int, n: int, dtype: jnp.dtype) -> int:
    """How many columns of a result make one swizzled row: they divide those of a run and of the result."""
    return math.gcd(columns, n, SWIZZLE // dtype.itemsize)


def _shared(launch: _Launch, dtype: jnp.dtype, products: int, run: int, out_dtype: jnp.dtype) -> list[Any]:
    tiles = launch.tiles
    leaving = plgpu.SMEM(
        (products, tiles.columns // launch.run, WARPGROUP_ROWS, launch.run),
        dtype=out_dtype,
        transforms=(
            plgpu.TilingTransform((STRIP, run)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(run * out_dtype.itemsize),  # pyright: ignore[reportAbstractUsage]
        ),
    )
    return list(
        _Shared(
            x=swizzled((tiles.stages, WARPGROUP_ROWS, DEPTH), dtype),
            weights=swizzled((tiles.stages, launch.weights * tiles.columns, DEPTH), dtype),
            leaving=leaving,
            full=plgpu.Barrier(
                num_arrivals=1 + launch.weights * tiles.columns // launch.run, num_barriers=tiles.stages
            ),
            free=plgpu.Barrier(num_arrivals=1, num_barriers=tiles.stages),
        )
    )


def _kernel(x, *refs, launch: _Launch) -> None:
    weights, layer, rest = refs[: launch.weights], refs[launch.weights], refs[launch.weights + 1 :]
    rotation, rest = (None, rest) if launch.pairs is None else (rest[:2], rest[2:])
    out, shared = rest[: -len(_Shared._fields)], _Shared(*rest[-len(_Shared._fields) :])
    let_next_start(launch.chained)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 1)
    def _loader():
        _load(x, weights, layer[0], shared, launch)

    @pl.when(warpgroup == 0)
    def _consumer():
        angles = None if rotation is None else _angles(rotation, launch)  # loaded while weights are
        _store(_multiply(shared, launch), angles, shared.leaving, out, launch)


def _load(x, weights: Sequence[Any], layer: Scalar, shared: _Shared, launch: _Launch) -> None:
    """Fill the ring's stages, each as soon as it is free; in a chain, the first with weights before there are
    rows."""
    tiles = launch.tiles
    begin, steps = launch.own_steps()
    runs = launch.runs()

    def load_weights(i: Scalar, _: None = None) -> None:
        stage, depth = launch.stage(i), pl.ds((begin + i) * DEPTH, DEPTH)
        for index, weight in enumerate(weights):
            for place, outputs in runs:
                to = shared.weights.at[stage, pl.ds(index * tiles.columns + place, launch.run)]
                plgpu.copy_gmem_to_smem(weight.at[layer, outputs, depth], to, shared.full.at[stage])

    def load_rows(i: Scalar, _: None = None) -> None:
        stage, depth = launch.stage(i), pl.ds((begin + i) * DEPTH, DEPTH)
        to = shared.x.at[stage, pl.ds(0, launch.rows)]
        plgpu.copy_gmem_to_smem(x.at[:, depth], to, shared.full.at[stage])

    def load(i: Scalar, _: None) -> None:
        pl.when(i >= tiles.stages)(lambda: plgpu.barrier_wait(shared.free.at[launch.stage(i)]))
        load_weights(i)
        load_rows(i)

    ahead = jnp.minimum(steps, tiles.stages) if launch.chained else 0
    if launch.chained:
        lax.fori_loop(0, ahead, load_weights, None)
        wait_for_kernel_before(launch.chained)
        lax.fori_loop(0, ahead, load_rows, None)
    lax.fori_loop(ahead, steps, load, None)
    drain(steps, tiles.stages, shared.free)


def _multiply(shared: _Shared, launch: _Launch) -> list[Tile]:
    """The products of the rows with the block's columns of each weight, in f32."""
    tiles = launch.tiles
    _, steps = launch.own_steps()

    def accumulate(*accumulators: Any) -> list[Tile]:
        def issue(i: Scalar | int) -> None:
            stage = launch.stage(i)
            plgpu.barrier_wait(shared.full.at[stage])
            for index, accumulator in enumerate(accumulators):
                weight = shared.weights.at[stage, pl.ds(index * tiles.columns, tiles.columns)]
                plgpu.wgmma(accumulator, shared.x.at[stage], weight.transpose((1, 0)))

        def release(i: Scalar) -> None:
            plgpu.barrier_arrive(shared.free.at[launch.stage(i)])

        def step(i: Scalar, _: None) -> None:
            issue(i)
            plgpu.wgmma_wait(launch.weights)  # of the steps, only this one is still under way
            release(i - 1)

        issue(0)
        lax.fori_loop(1, steps, step, None)
        sums = [accumulator[...] for accumulator in accumulators]
        release(steps - 1)
        return sums

    accumulator = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, tiles.columns))
    return pl.run_scoped(accumulate, *[accumulator] * launch.weights)


def _angles(rotation: Sequence[Any], launch: _Launch) -> Rotation:
    """Cosine and sine of the block's pairs."""
    pairs = pl.ds(launch.first_pair(), launch.run)
    cos, sin = (plgpu.load(x.at[:, pairs], layout=plgpu.Layout.WGMMA, optimized=False) for x in rotation)
    return cos, sin


def _store(
    sums: Sequence[Tile], angles: Rotation | None, leaving: Any, out: Sequence[Any], launch: _Launch
) -> None:
    """Round what is complete, and write the rows that were loaded."""
    runs = launch.runs()
    results = [x.astype(out[0].dtype) for x in sums]
    if launch.gated:
        results = [gated(*results)]
    for index, result in enumerate(results):
        values = [result[:, place : place + launch.run] for place, _ in runs]
        if angles is not None and index < len(results) - 1:
            values = _rotated(values[0], values[1], *angles)
        for run, value in enumerate(values):
            leaving[index, run] = value
    plgpu.commit_smem()
    split, rows = lax.axis_index("split"), pl.ds(0, launch.rows)
    for index, ref in enumerate(out):
        for run, (_, columns) in enumerate(runs):
            plgpu.copy_smem_to_gmem(leaving.at[index, run, rows], ref.at[split, :, columns])
    plgpu.wait_smem_to_gmem(0)


def _rotated(a: Tile, b: Tile, cos: Tile, sin: Tile) -> list[Tile]:
    x, y = a.astype(jnp.float32), b.astype(jnp.float32)
    return [(x * cos - y * sin).astype(a.dtype), (y * cos + x * sin).astype(a.dtype)]
