"""The Hopper kernel of products of a few rows, in Pallas for Mosaic GPU.

One warpgroup of a block streams the rows and the block's columns of a weight, or of both weights of a gated
product, by TMA through a ring of stages; the other multiplies (wgmma). Weights are the left operand, of which
a product takes 64 columns at a time, and the rows the right one, of which it takes as many as there are: the
other way round it would be of 64 rows, most of which nobody asked for. Sums turn round in shared memory on
their way out. Where queries and keys are rotated, the columns of a block are two runs of one head, so that
both numbers of a pair are at hand.
"""

import dataclasses
import functools
import itertools
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
from jdllm.pallas.hopper import STRIP
from jdllm.pallas.ring import COMPILER_PARAMS, drain, swizzled
from jdllm.pallas.shared_lowering import lowered_once
from jdllm.pallas.skinny_matmul.tiles import (
    COLUMN_UNIT,
    DEPTH,
    SUMS_PADDING,
    Tiles,
    blocks_of,
    product_columns,
    summed_columns,
)
from jdllm.pallas.skinny_matmul.types import Bias, Rotation, Stack, X

Scalar = Int[Array, ""]
Sums = Float[Array, "product_columns rows"]
Strip = Float[Array, "rows 16"]


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
        """Columns of all stages, one below the other."""
        (_, weights), _ = self.ring
        return weights

    @property
    def sums(self) -> Any:
        """In the place of the ring, which is done with by then."""
        _, sums = self.ring
        return sums


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
    def summed(self) -> int:
        """How many columns of weights a stage holds."""
        return summed_columns(self.tiles.columns, self.gated)

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


@lowered_once("tiles", "gated", "chained")
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
    - `rotation`: cosine and sine of each row: all products but the last are rotated.
    - `chained`: part of a chain of kernels, where all but `x` is older.

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
        scratch_types=_shared(launch, x.dtype),
        grid=(sum(launch.blocks), tiles.splits),
        grid_names=("column_block", "split"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="skinny_matmul",
    )
    return kernel(x, layer.reshape(1), *weights, *(() if bias is None else (bias,)), *(rotation or ()))


def _shared(launch: _Launch, dtype: jnp.dtype) -> list[Any]:
    tiles, product = launch.tiles, product_columns(launch.summed)
    x = swizzled((tiles.stages * launch.rows, DEPTH), dtype)
    # A product takes multiples of 64 columns: those beyond a stage's are of the stages that follow.
    weights = swizzled(((tiles.stages - 1) * launch.summed + product, DEPTH), dtype)
    sums = plgpu.SMEM((product, launch.rows + SUMS_PADDING), dtype=jnp.float32)
    return list(
        _Shared(
            ring=plgpu.RefUnion((x, weights), sums),
            full=plgpu.Barrier(num_arrivals=1 + launch.summed // launch.run, num_barriers=tiles.stages),
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
        shared.sums[:, : launch.rows] = _multiply(shared, launch)

        def store(index: int) -> None:
            turned = index < len(weights) - 1
            _store(shared.sums, angles if turned else None, bias, out[index], columns, launch)

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
                to = shared.weights.at[
                    pl.ds(stage * launch.summed + slot * tiles.columns + place, launch.run)
                ]
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


def _multiply(shared: _Shared, launch: _Launch) -> Sums:
    """The products of the rows with the block's columns of a weight, or of both, in f32."""
    _, steps = launch.own_steps()
    product = product_columns(launch.summed)

    def accumulate(sums: Any) -> Sums:
        def issue(i: Scalar | int) -> None:
            stage = launch.stage(i)
            weights = shared.weights.at[pl.ds(stage * launch.summed, product)]
            x = shared.x.at[pl.ds(stage * launch.rows, launch.rows)]
            plgpu.barrier_wait(shared.full.at[stage])
            plgpu.wgmma(sums, weights, x.transpose((1, 0)))

        def release(i: Scalar) -> None:
            plgpu.barrier_arrive(shared.free.at[launch.stage(i)])

        def step(i: Scalar, _: None) -> None:
            issue(i)
            plgpu.wgmma_wait(1)  # of the steps, only this one is still under way
            release(i - 1)

        # Products are issued before those of the step before have ended; a stage is free a step later. Where
        # a product takes more columns than a stage has, nobody reads the sums of the others.
        issue(0)
        lax.fori_loop(1, steps, step, None)
        whole = sums[...]
        release(steps - 1)
        return whole

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((product, launch.rows)))


def _angles(rotation: Sequence[Any], launch: _Launch) -> list[Rotation]:
    """Cosine and sine of the block's pairs, a strip after the other."""
    first = launch.first_pair()
    strips = [pl.ds(first + begin, COLUMN_UNIT) for begin in range(0, launch.run, COLUMN_UNIT)]
    cos, sin = ([_load_strip(x.at[:, strip]) for strip in strips] for x in rotation)
    return list(zip(cos, sin, strict=True))


def _bias(bias: Any, columns: Sequence[pl.Slice], launch: _Launch) -> list[list[Float[Array, " 16"]]]:
    """What is added to each row of the block's runs, a strip after the other."""
    before, layout = launch.before(launch.outputs), _STRIP_LAYOUT.reduce(0)

    def strip(begin: Scalar | int) -> Float[Array, " 16"]:
        values = bias.at[pl.ds(before + begin, COLUMN_UNIT)]
        return plgpu.load(values, layout=layout, optimized=False).astype(jnp.float32)

    begins = range(0, launch.run, COLUMN_UNIT)
    return [[strip(run.start + begin) for begin in begins] for run in columns]


def _store(
    sums: Any,
    angles: Sequence[Rotation] | None,
    bias: Sequence[Sequence[Float[Array, " 16"]]] | None,
    out: Any,
    columns: Sequence[pl.Slice],
    launch: _Launch,
) -> None:
    """Round, gate and rotate what is complete, and write what the weight has, strip by strip."""
    split = lax.axis_index("split")

    def sums_of(column: int) -> Strip:
        strip = sums.at[pl.ds(column, COLUMN_UNIT), pl.ds(0, launch.rows)]
        return _load_strip(strip.transpose((1, 0)))

    for strip, begin in enumerate(range(0, launch.run, COLUMN_UNIT)):
        values = [sums_of(run * launch.run + begin) for run in range(len(columns))]
        if bias is not None:
            values = [x + _down(of_run[strip], launch.rows) for x, of_run in zip(values, bias, strict=True)]
        values = [x.astype(out.dtype) for x in values]
        if launch.gated:
            values = [gated(values[0], sums_of(launch.tiles.columns + begin).astype(out.dtype))]
        if angles is not None:
            values = _rotated(values[0], values[1], *angles[strip])
        for run, value in zip(columns, values, strict=True):
            first = run.start + begin
            # Of the last block some columns may be beyond the weight.
            inside = True if out.shape[2] % launch.tiles.columns == 0 else first < out.shape[2]
            pl.when(inside)(functools.partial(_write, out.at[split, :, pl.ds(first, COLUMN_UNIT)], value))


def _write(to: Any, value: Strip) -> None:
    to[...] = value


def _rotated(a: Strip, b: Strip, cos: Strip, sin: Strip) -> list[Strip]:
    x, y = a.astype(jnp.float32), b.astype(jnp.float32)
    return [(x * cos - y * sin).astype(a.dtype), (y * cos + x * sin).astype(a.dtype)]


# Of 8 rows and a strip's columns, each warp has two rows: it reads sums from different banks and writes whole
# sectors of memory.
_STRIP_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((STRIP, COLUMN_UNIT), (2, COLUMN_UNIT), (1,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def _load_strip(values: Any) -> Strip:
    return plgpu.load(values, layout=_STRIP_LAYOUT, optimized=False)


def _down(values: Float[Array, " 16"], rows: int) -> Strip:
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (rows, COLUMN_UNIT), [1]), _STRIP_LAYOUT)
