"""The Hopper kernel of products of a few rows, in Pallas for Mosaic GPU.

One warpgroup of a block streams the rows and the block's columns of a weight, or of both weights of a gated
product, by TMA through a ring of stages; the other multiplies (wgmma). Quantised weights have several that
multiply: what they do to each weight takes longer than the product. Weights are the left operand, of which
a product takes 64 columns at a time, and the rows the right one, of which it takes as many as there are: the
other way round it would be of 64 rows, most of which nobody asked for. Sums turn round in shared memory on
their way out. Where queries and keys are rotated, the columns of a block are two runs of one head, so that
both numbers of a pair are at hand.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jdllm.pallas.chain import let_next_start, wait_for_kernel_before
from jdllm.pallas.gating import gated
from jdllm.pallas.hopper import STRIP
from jdllm.pallas.products import Widening
from jdllm.pallas.ring import COMPILER_PARAMS, drain, swizzled
from jdllm.pallas.shared_lowering import lowered_once
from jdllm.pallas.skinny_matmul.launch import GROUPS, Launch, Scalar, Shared
from jdllm.pallas.skinny_matmul.sums import multiply, multiply_quantised
from jdllm.pallas.skinny_matmul.tiles import COLUMN_UNIT, SUMS_PADDING, Tiles
from jdllm.pallas.skinny_matmul.types import Bias, Rotation, X

Strip = Float[Array, "rows 16"]


@lowered_once("tiles", "products", "gated", "chained")
def block_products(
    x: X,
    weights: Sequence[Array],
    scales: Sequence[Sequence[Float[Array, "layers ..."]]],
    layer: Scalar,
    tiles: Tiles,
    products: Widening,
    *,
    gated: bool,
    bias: Bias | None,
    rotation: Rotation | None,
    chained: bool,
) -> list[Float[Array, "splits rows n"]]:
    """Multiply the rows with the layer's matrix of each stack.

    Arguments:
    - `x`: bfloat16 or float16, a multiple of 8 rows, at most 64.
    - `weights`: `[layers, n, k]` of the dtype of `x`, `k` a multiple of 64, or 8 bits, `k` a multiple of 128,
      or `[layers, n, k / 2]` of two numbers each; each has its own `n`, a multiple of 16 or, of these, 32.
    - `scales`: of each quantised weight, f32 `[layers, n]`, or of each group of 128 inputs, `[layers, groups,
      n]`; or its scales and its offsets of each group of 32 inputs, bfloat16 `[layers, groups, n]`.
    - `layer`: index of the matrices.
    - `tiles`: the cut, which passed `Tiles.check`.
    - `products`: how quantised weights are multiplied.
    - `gated`: whether the one result is silu of the first product times the second.
    - `bias`: what is added to the products of each layer, one product after the other.
    - `rotation`: cosine and sine of each row: all products but the last are rotated.
    - `chained`: part of a chain of kernels, where all but `x` is older.

    Returns a product for each stack, or the gated one: in the dtype of `x` where the inputs are whole, else
    f32 sums of each part of them.
    """
    rows, k = x.shape
    outputs = tuple(w.shape[1] for w in weights)
    pairs = None if rotation is None else rotation[0].shape[1]
    launch = Launch(tiles, rows, k // tiles.depth, outputs, gated, bias is not None, pairs, chained)
    dtype = x.dtype if tiles.splits == 1 else jnp.dtype(jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch, products=products),
        out_type=[jax.ShapeDtypeStruct((tiles.splits, rows, n), dtype) for n in launch.results],
        scratch_types=_shared(launch, x.dtype, weights[0].dtype),
        grid=(sum(launch.blocks), tiles.splits),
        grid_names=("column_block", "split"),
        num_threads=launch.consumers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="skinny_matmul",
    )
    added = () if bias is None else (bias,)
    parts = [part for of_weight in scales for part in of_weight]
    return kernel(x, layer.reshape(1), *weights, *parts, *added, *(rotation or ()))


def _shared(launch: Launch, dtype: jnp.dtype, weights_dtype: jnp.dtype) -> list[Any]:
    tiles, product = launch.tiles, launch.product
    x = swizzled((tiles.stages * launch.rows, tiles.depth), dtype)
    # A product takes multiples of 64 columns: those beyond a stage's are of the stages that follow.
    columns = (tiles.stages - 1) * launch.stage_columns + product
    operands = [
        x,
        swizzled((columns, tiles.depth * tiles.bits // (8 * weights_dtype.itemsize)), weights_dtype),
    ]
    if tiles.shifted:
        groups = tiles.stages * launch.all_runs * 2 * GROUPS
        operands.append(plgpu.SMEM((groups, launch.run), dtype=jnp.bfloat16))
    elif tiles.grouped:
        operands.append(plgpu.SMEM((columns,), dtype=jnp.float32))
    sums = plgpu.SMEM((tiles.turns * product, launch.rows + SUMS_PADDING), dtype=jnp.float32)
    return list(
        Shared(
            ring=plgpu.RefUnion(tuple(operands), sums),
            full=plgpu.Barrier(num_arrivals=launch.copies, num_barriers=tiles.stages),
            free=plgpu.Barrier(num_arrivals=launch.consumers // tiles.turns, num_barriers=tiles.stages),
            together=plgpu.Barrier(num_arrivals=launch.consumers, num_barriers=2),
        )
    )


def _kernel(x, layer, *refs, launch: Launch, products: Widening) -> None:
    given = iter(refs)
    weights = list(itertools.islice(given, len(launch.outputs)))
    parts = 1 + launch.tiles.shifted
    scales = [list(itertools.islice(given, parts)) for _ in weights] if launch.tiles.quantised else []
    added = next(given) if launch.biased else None
    rotation = list(itertools.islice(given, 0 if launch.pairs is None else 2))
    out = list(itertools.islice(given, len(launch.results)))
    shared = Shared(*given)
    let_next_start(launch.chained)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == launch.consumers)
    def _loader():
        _load(x, weights, scales, layer[0], shared, launch)

    @pl.when(warpgroup < launch.consumers)
    def _consumer():
        # Loaded while weights are.
        columns = [outputs for _, outputs in launch.runs()]
        angles = _angles(rotation, launch) if rotation else None
        bias = None if added is None else _bias(added.at[layer[0]], columns, launch)
        of_rows = () if launch.tiles.grouped else scales
        factors = _scales([of.at[layer[0]] for (of,) in of_rows], columns, launch)
        if scales:
            multiply_quantised(shared, launch, products)
        else:
            shared.sums[:, : launch.rows] = multiply(shared, launch)

        def store(index: int) -> None:
            turned = index < len(weights) - 1
            _store(shared.sums, factors, angles if turned else None, bias, out[index], columns, launch)

        launch.for_own_weight(store)


def _load(
    x: Any,
    weights: Sequence[Any],
    scales: Sequence[Sequence[Any]],
    layer: Scalar,
    shared: Shared,
    launch: Launch,
) -> None:
    """Fill the ring's stages, each as soon as it is free; in a chain, the first with weights before there are
    rows."""
    tiles = launch.tiles
    begin, steps = launch.own_steps()
    runs = launch.runs()

    def load_weights(i: Scalar, _: None = None) -> None:
        stage, width = launch.stage(i), shared.weights.shape[1]
        full, depth = shared.full.at[stage], pl.ds((begin + i) * width, width)

        def load_columns(index: int, slot: int = 0) -> None:
            for place, outputs in runs:
                to = pl.ds(stage * launch.stage_columns + slot * tiles.columns + place, launch.run)
                plgpu.copy_gmem_to_smem(weights[index].at[layer, outputs, depth], shared.weights.at[to], full)
                if tiles.shifted:
                    rows = launch.first_group(stage, (slot * tiles.columns + place) // launch.run)
                    groups = pl.ds((begin + i) * GROUPS, GROUPS)
                    for which, part in enumerate(scales[index]):
                        to = shared.scales.at[pl.ds(rows + which * GROUPS, GROUPS)]
                        plgpu.copy_gmem_to_smem(part.at[layer, groups, outputs], to, full)
                elif tiles.grouped:
                    of_group = scales[index][0].at[layer, begin + i, outputs]
                    plgpu.copy_gmem_to_smem(of_group, shared.scales.at[to], full)

        launch.for_own_weight(load_columns)
        if launch.gated:
            load_columns(1, slot=1)

    def load_rows(i: Scalar, _: None = None) -> None:
        stage, depth = launch.stage(i), pl.ds((begin + i) * launch.tiles.depth, launch.tiles.depth)
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


def _angles(rotation: Sequence[Any], launch: Launch) -> list[Rotation]:
    """Cosine and sine of the block's pairs, of one own strip after the other."""
    first = launch.first_pair()
    strips = [pl.ds(first + begin, COLUMN_UNIT) for begin in launch.begins()]
    cos, sin = ([_load_strip(x.at[:, strip]) for strip in strips] for x in rotation)
    return list(zip(cos, sin, strict=True))


def _bias(bias: Any, columns: Sequence[pl.Slice], launch: Launch) -> list[list[Float[Array, " 16"]]]:
    """What is added to each row of the block's runs, of one own strip after the other."""
    before = launch.before(launch.outputs)
    return [[_sixteen(bias, before + run.start + begin) for begin in launch.begins()] for run in columns]


def _scales(
    scales: Sequence[Any], columns: Sequence[pl.Slice], launch: Launch
) -> list[list[list[Float[Array, " 16"]]]]:
    """The scales of the block's columns, of both weights where two are gated, by runs and own strips."""

    def of_weight(index: int) -> list[list[Float[Array, " 16"]]]:
        own, begins = scales[index], launch.begins()
        last = own.shape[0] - COLUMN_UNIT  # of columns beyond the weight nobody reads the product
        return [[_sixteen(own, jnp.minimum(run.start + begin, last)) for begin in begins] for run in columns]

    if not scales or launch.gated:
        return [of_weight(index) for index in range(len(scales))]
    own = of_weight(0)
    for index in range(1, len(scales)):
        own = lax.cond(launch.owns(index), functools.partial(of_weight, index), lambda own=own: own)
    return [own]


def _store(
    sums: Any,
    scales: Sequence[Sequence[Sequence[Float[Array, " 16"]]]],
    angles: Sequence[Rotation] | None,
    bias: Sequence[Sequence[Float[Array, " 16"]]] | None,
    out: Any,
    columns: Sequence[pl.Slice],
    launch: Launch,
) -> None:
    """Round, gate and rotate what is complete, and write what the weight has of the warpgroup's strips."""
    split, begins = lax.axis_index("split"), launch.begins()

    def sums_of(slot: int, run: int, strip: int) -> Strip:
        column = slot * launch.tiles.columns + run * launch.run + begins[strip]
        places = range(0, launch.tiles.turns * launch.product, launch.product)
        parts = [sums.at[pl.ds(place + column, COLUMN_UNIT), pl.ds(0, launch.rows)] for place in places]
        values = functools.reduce(jnp.add, (_load_strip(part.transpose((1, 0))) for part in parts))
        return values * _down(scales[slot][run][strip], launch.rows) if scales else values

    for strip, begin in enumerate(begins):
        values = [sums_of(0, run, strip) for run in range(len(columns))]
        if bias is not None:
            values = [x + _down(of_run[strip], launch.rows) for x, of_run in zip(values, bias, strict=True)]
        values = [x.astype(out.dtype) for x in values]
        if launch.gated:
            values = [gated(values[0], sums_of(1, 0, strip).astype(out.dtype))]
        if angles is not None:
            values = _rotated(values[0], values[1], *angles[strip])
        for run, value in zip(columns, values, strict=True):
            first = run.start + begin
            # Of the last block some columns may be beyond the weight.
            inside = True if out.shape[2] % launch.tiles.columns == 0 else first < out.shape[2]
            pl.when(launch.stores(strip) & inside)(
                functools.partial(_write, out.at[split, :, pl.ds(first, COLUMN_UNIT)], value)
            )


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


def _sixteen(values: Any, begin: Scalar) -> Float[Array, " 16"]:
    """A number for each column of a strip."""
    strip = values.at[pl.ds(begin, COLUMN_UNIT)]
    return plgpu.load(strip, layout=_STRIP_LAYOUT.reduce(0), optimized=False).astype(jnp.float32)


def _load_strip(values: Any) -> Strip:
    return plgpu.load(values, layout=_STRIP_LAYOUT, optimized=False)


def _down(values: Float[Array, " 16"], rows: int) -> Strip:
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (rows, COLUMN_UNIT), [1]), _STRIP_LAYOUT)
