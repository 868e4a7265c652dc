"""The Hopper kernel of products of a few rows, in Pallas for Mosaic GPU.

One warpgroup of a block streams the rows and the block's columns of a weight, or of both weights of a gated
product, by TMA through a ring of stages; the other multiplies (wgmma). A product has 64 rows: those that
nothing was loaded for hold anything, and their results do not leave. Where queries and keys are rotated, the
columns of a block are two runs of one head, so that both numbers of a pair are at hand.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
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
from jdllm.pallas.skinny_matmul.tiles import DEPTH, Tiles, blocks_of, summed_columns
from jdllm.pallas.skinny_matmul.types import Bias, Rotation, Stack, X

Scalar = Int[Array, ""]
Tile = Float[Array, "64 columns"]


class _Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that say when a stage is full and when it is free."""

    ring: Any
    full: Any
    free: Any

    @property
    def x(self) -> Any:
        """Rows of all stages, one below the other."""
        (x, _), _ = self.ring
        return x

    @property
    def weights(self) -> Any:
        (_, weights), _ = self.ring
        return weights

    @property
    def leaving(self) -> Any:
        """Results; in the place of the ring, which is done with by then."""
        _, leaving = self.ring
        return leaving


@dataclasses.dataclass(frozen=True)
class _Launch:
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
    def results(self) -> tuple[int, ...]:
        """Outputs of each result."""
        return self.outputs[: len(self.blocks)]

    def for_own_weight(self, visit: Callable[[int], None]) -> None:
        """Call `visit` with the index of the weight whose columns the block takes."""
        if len(self.blocks) == 1:
            return visit(0)
        ends = list(itertools.accumulate(self.blocks))
        block = lax.axis_index("column_block")
        for index, end in enumerate(ends):
            mine = (end - self.blocks[index] <= block) & (block < end)
            pl.when(mine)(functools.partial(visit, index))

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


def block_products(
    x: X,
    weights: Sequence[Stack],
    layer: Scalar,
    tiles: Tiles,
    *,
    gated: bool,
    bias: Bias | None,
    rotation: Rotation | None,
    chained: bool,
) -> list[Float[Array, "splits rows n"]]:
    """Multiply the rows with the layer's matrix of each stack.

    Arguments:
    - `x`: bfloat16 or float16, a multiple of 8 rows, at most 64.
    - `weights`: of the dtype of `x`, `k` a multiple of 64; each has its own `n`, a multiple of 16.
    - `layer`: index of the matrices.
    - `tiles`: the cut, which passed `Tiles.check`.
    - `gated`: whether the one result is silu of the first product times the second.
    - `bias`: what is added to the products of each layer, one product after the other.
    - `rotation`: cosine and sine, of 64 rows each: all products but the last are rotated.
    - `chained`: as in `jdllm.pallas.chain`; all but `x` is older than the chain.

    Returns a product for each stack, or the gated one: in the dtype of `x` where the inputs are whole, else
    f32 sums of each part of them.
    """
    rows, (_, _, k) = x.shape[0], weights[0].shape
    outputs = tuple(w.shape[1] for w in weights)
    pairs = None if rotation is None else rotation[0].shape[1]
    launch = _Launch(tiles, rows, k // DEPTH, outputs, gated, bias is not None, pairs, chained)
    dtype = x.dtype if tiles.splits == 1 else jnp.dtype(jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=[jax.ShapeDtypeStruct((tiles.splits, rows, n), dtype) for n in launch.results],
        scratch_types=_shared(launch, x.dtype, dtype),
        grid=(sum(launch.blocks), tiles.splits),
        grid_names=("column_block", "split"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="skinny_matmul",
    )
    return kernel(x, layer.reshape(1), *weights, *(() if bias is None else (bias,)), *(rotation or ()))


def _shared(launch: _Launch, dtype: jnp.dtype, out_dtype: jnp.dtype) -> list[Any]:
    tiles = launch.tiles
    # How many columns of a result make one swizzled row: they divide those of a run and of each result.
    row = math.gcd(launch.run, *launch.outputs, SWIZZLE // out_dtype.itemsize)
    columns, runs = summed_columns(tiles.columns, launch.gated), tiles.columns // launch.run
    leaving = plgpu.SMEM(
        (runs, WARPGROUP_ROWS, launch.run),
        dtype=out_dtype,
        transforms=(
            plgpu.TilingTransform((STRIP, row)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(row * out_dtype.itemsize),  # pyright: ignore[reportAbstractUsage]
        ),
    )
    # A product takes 64 rows: those that nothing was loaded for are of the stages that follow.
    x = swizzled(((tiles.stages - 1) * launch.rows + WARPGROUP_ROWS, DEPTH), dtype)
    weights = swizzled((tiles.stages, columns, DEPTH), dtype)
    return list(
        _Shared(
            ring=plgpu.RefUnion((x, weights), leaving),
            full=plgpu.Barrier(num_arrivals=1 + columns // launch.run, num_barriers=tiles.stages),
            free=plgpu.Barrier(num_arrivals=1, num_barriers=tiles.stages),
        )
    )


def _kernel(x, layer, *refs, launch: _Launch) -> None:
    given = iter(refs)
    weights = list(itertools.islice(given, len(launch.outputs)))
    added = next(given) if launch.biased else None
    rotation = list(itertools.islice(given, 0 if launch.pairs is None else 2))
    out = list(itertools.islice(given, len(launch.results)))
    shared = _Shared(*given)
    let_next_start(launch.chained)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 1)
    def _loader():
        _load(x, weights, layer[0], shared, launch)

    @pl.when(warpgroup == 0)
    def _consumer():
        # Loaded while weights are.
        columns = [outputs for _, outputs in launch.runs()]
        angles = _angles(rotation, launch) if rotation else None
        bias = None if added is None else _bias(added.at[layer[0]], columns, launch)
        sums = _multiply(shared, launch)
        whole = gated(*(x.astype(out[0].dtype) for x in sums)) if launch.gated else sums[0]
        runs = [whole[:, begin : begin + launch.run] for begin in range(0, launch.tiles.columns, launch.run)]
        if bias is not None:
            runs = [run + lax.broadcast_in_dim(b, run.shape, [1]) for run, b in zip(runs, bias, strict=True)]

        def store(index: int) -> None:
            turned = index < len(weights) - 1
            _store(runs, angles if turned else None, shared.leaving, out[index], columns, launch)

        launch.for_own_weight(store)


def _load(x, weights: Sequence[Any], layer: Scalar, shared: _Shared, launch: _Launch) -> None:
    """Fill the ring's stages, each as soon as it is free; in a chain, the first with weights before there are
    rows."""
    tiles = launch.tiles
    begin, steps = launch.own_steps()
    runs = launch.runs()

    def load_weights(i: Scalar, _: None = None) -> None:
        stage, depth = launch.stage(i), pl.ds((begin + i) * DEPTH, DEPTH)

        def load_columns(index: int, slot: int = 0) -> None:
            for place, outputs in runs:
                to = shared.weights.at[stage, pl.ds(slot * tiles.columns + place, launch.run)]
                plgpu.copy_gmem_to_smem(weights[index].at[layer, outputs, depth], to, shared.full.at[stage])

        launch.for_own_weight(load_columns)
        if launch.gated:
            load_columns(1, slot=1)

    def load_rows(i: Scalar, _: None = None) -> None:
        stage, depth = launch.stage(i), pl.ds((begin + i) * DEPTH, DEPTH)
        to = shared.x.at[pl.ds(stage * launch.rows, launch.rows)]
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
    """The products of the rows with the block's columns of a weight, or of both, in f32."""
    tiles = launch.tiles
    _, steps = launch.own_steps()

    def accumulate(*accumulators: Any) -> list[Tile]:
        def issue(i: Scalar | int) -> None:
            stage = launch.stage(i)
            x = shared.x.at[pl.ds(stage * launch.rows, WARPGROUP_ROWS)]
            plgpu.barrier_wait(shared.full.at[stage])
            for index, accumulator in enumerate(accumulators):
                weight = shared.weights.at[stage, pl.ds(index * tiles.columns, tiles.columns)]
                plgpu.wgmma(accumulator, x, weight.transpose((1, 0)))

        def release(i: Scalar) -> None:
            plgpu.barrier_arrive(shared.free.at[launch.stage(i)])

        def step(i: Scalar, _: None) -> None:
            issue(i)
            plgpu.wgmma_wait(len(accumulators))  # of the steps, only this one is still under way
            release(i - 1)

        issue(0)
        lax.fori_loop(1, steps, step, None)
        sums = [accumulator[...] for accumulator in accumulators]
        release(steps - 1)
        return sums

    accumulator = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, tiles.columns))
    return pl.run_scoped(accumulate, *[accumulator] * (2 if launch.gated else 1))


def _angles(rotation: Sequence[Any], launch: _Launch) -> Rotation:
    """Cosine and sine of the block's pairs."""
    pairs = pl.ds(launch.first_pair(), launch.run)
    cos, sin = (plgpu.load(x.at[:, pairs], layout=plgpu.Layout.WGMMA, optimized=False) for x in rotation)
    return cos, sin


def _bias(bias: Any, columns: Sequence[pl.Slice], launch: _Launch) -> list[Float[Array, " run"]]:
    """What is added to each row of the block's runs."""
    before, layout = launch.before(launch.outputs), plgpu.Layout.WGMMA.reduce(0)
    runs = [pl.ds(before + run.start, launch.run) for run in columns]
    return [plgpu.load(bias.at[run], layout=layout, optimized=False).astype(jnp.float32) for run in runs]


def _store(
    sums: Sequence[Tile],
    angles: Rotation | None,
    leaving: Any,
    out: Any,
    columns: Sequence[pl.Slice],
    launch: _Launch,
) -> None:
    """Round and rotate what is complete, and write the rows that were loaded."""
    values = [run.astype(out.dtype) for run in sums]
    if angles is not None:
        values = _rotated(values[0], values[1], *angles)
    for run, value in enumerate(values):
        leaving[run] = value
    plgpu.commit_smem()
    split, rows = lax.axis_index("split"), pl.ds(0, launch.rows)
    for run, place in enumerate(columns):
        plgpu.copy_smem_to_gmem(leaving.at[run, rows], out.at[split, :, place])
    plgpu.wait_smem_to_gmem(0)


def _rotated(a: Tile, b: Tile, cos: Tile, sin: Tile) -> list[Tile]:
    x, y = a.astype(jnp.float32), b.astype(jnp.float32)
    return [(x * cos - y * sin).astype(a.dtype), (y * cos + x * sin).astype(a.dtype)]
