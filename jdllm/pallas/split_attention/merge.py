"""The second kernel of Split-S attention: the pieces of each pair of head and request become one result.

A warpgroup takes four queries of one head, or one query of four heads, each warp a row, and loads several
pieces at once: the time of this kernel is the latency of its loads.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jdllm.pallas.attention.types import AttentionOutput
from jdllm.pallas.chain import let_next_start, wait_for_kernel_before
from jdllm.pallas.hopper import STRIP
from jdllm.pallas.ring import COMPILER_PARAMS
from jdllm.pallas.shared_lowering import lowered_once
from jdllm.pallas.split_attention.softmax import LOWEST
from jdllm.pallas.split_attention.tiles import Tiles
from jdllm.pallas.split_attention.work import Partials, Scalar, Shape, share_of, usual_pieces

_MOST_AT_ONCE = 20  # pieces whose loads are in flight together: of one, a lane has four numbers and more
_WARPS, _LANES = 4, 32  # of a warpgroup


@lowered_once("shape", "tiles", "dtype", "chained")
def merge_partials(
    partials: Partials, first: jax.Array, shape: Shape, tiles: Tiles, dtype: jnp.dtype, *, chained: bool
) -> AttentionOutput:
    """Merge by log-sum-exp.

    Arguments:
    - `partials`: what the workers left, for the same `first`, `shape` and `tiles`.
    - `dtype`: of the output.
    - `chained`: part of a chain of kernels, where `first` is older.

    Returns (o, m, l) for all padded queries.
    """
    queries = (shape.requests, shape.queries, shape.kv_heads * shape.group)
    per_query = jax.ShapeDtypeStruct(queries, jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, shape=shape, tiles=tiles, chained=chained),
        out_type=[jax.ShapeDtypeStruct((*queries, shape.head_dim), dtype), per_query, per_query],
        grid=(shape.pairs, shape.rows // _rows_of(shape)),
        grid_names=("pair", "rows"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="merge_split_attention",
    )
    return AttentionOutput(*kernel(*partials, first))


def _kernel(
    o_parts, m_parts, l_parts, first, o_ref, m_ref, l_ref, *, shape: Shape, tiles: Tiles, chained: bool
) -> None:
    let_next_start(chained)
    size = _rows_of(shape)
    pair, row = lax.axis_index("pair"), lax.axis_index("rows") * size
    head, request = lax.div(pair, jnp.int32(shape.requests)), lax.rem(pair, jnp.int32(shape.requests))
    slot, count = _pieces(pair, head, request, first, shape, tiles)
    wait_for_kernel_before(chained)
    rows = _several(_loaded_row(row, request, head, shape), size)
    dims = () if size == 1 else (size,)
    layout = _layout(dims, shape.head_dim)
    per_row = layout.reduce(1) if dims else None
    at_once = min(usual_pieces(shape, tiles), _MOST_AT_ONCE)

    def load(ref: Any, index: Scalar, to: Any) -> Array:
        return plgpu.load(ref.at[slot + jnp.minimum(index, count - 1), rows], layout=to, optimized=False)

    def visit(i: Scalar, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        o, m, total = state
        indices = [i * at_once + j for j in range(at_once)]
        outputs = [load(o_parts, index, layout) for index in indices]
        maxima = [load(m_parts, index, per_row) for index in indices]
        totals = [load(l_parts, index, per_row) for index in indices]
        # The last round takes the last piece again and again; once is enough.
        maxima = [jnp.where(index < count, x, 2 * LOWEST) for index, x in zip(indices, maxima, strict=True)]
        highest = functools.reduce(jnp.maximum, maxima, m)
        decay = jnp.exp2(m - highest)
        o, total = o * across(decay), total * decay
        for index, output, part, maximum in zip(indices, outputs, totals, maxima, strict=True):
            weight = jnp.where(index < count, jnp.exp2(maximum - highest), 0.0)
            o, total = o + output * across(weight), total + part * weight
        return o, highest, total

    def across(values: Array) -> Array:
        filled = lax.broadcast_in_dim(values, (*dims, shape.head_dim), range(len(dims)))
        return plgpu.layout_cast(filled, layout)

    def splat(value: float, extent: tuple[int, ...], to: Any) -> Array:
        filled = jnp.full(extent, value, jnp.float32)
        return filled if to is None else plgpu.layout_cast(filled, to)

    empty = (
        splat(0.0, (*dims, shape.head_dim), layout),
        splat(LOWEST, dims, per_row),
        splat(0.0, dims, per_row),
    )
    rounds = lax.div(count + (at_once - 1), jnp.int32(at_once))
    o, m, total = lax.fori_loop(0, rounds, visit, empty)
    seen = total > 0
    to = request, *_queries_and_heads(head, row, size, shape)
    o = o * across(1 / jnp.where(seen, total, 1.0))
    o_ref[to] = o.astype(o_ref.dtype)
    m_ref[to] = jnp.where(seen, m * math.log(2), -jnp.inf)
    l_ref[to] = total


def _pieces(
    pair: Scalar, head: Scalar, request: Scalar, first: Any, shape: Shape, tiles: Tiles
) -> tuple[Scalar, Scalar]:
    """The first piece of a pair, and how many there are."""
    share = share_of(first, shape, tiles)
    before = head * share.head_tiles
    begin = before + first[request] * shape.page_tiles
    end = before + first[request + 1] * shape.page_tiles
    worker = share.worker_of(begin)
    count = jnp.where(begin < end, share.worker_of(end - 1) - worker + 1, 0)
    return (worker + pair) * tiles.key_groups, count * tiles.key_groups


def _rows_of(shape: Shape) -> int:
    """Rows of a pair that a warpgroup takes."""
    return math.gcd(shape.group, _WARPS) if shape.single else _WARPS


def _loaded_row(row: Scalar, request: Scalar, head: Scalar, shape: Shape) -> Scalar:
    """Where a row of a pair is among those that were loaded."""
    return row + lax.rem(shape.first_head(request, head), jnp.int32(STRIP)) if shape.single else row


def _queries_and_heads(head: Scalar, row: Scalar, size: int, shape: Shape) -> tuple[Any, Any]:
    """What the rows of a pair from `row` on are."""
    if shape.single:
        return 0, _several(head * shape.group + row, size)
    queries = pl.ds(lax.rem(row, jnp.int32(shape.queries)), size)
    return queries, head * shape.group + lax.div(row, jnp.int32(shape.queries))


def _several(begin: Scalar, size: int) -> Any:
    """So many places; a single one is no dimension, since numbers are stored by scalars only."""
    return begin if size == 1 else pl.ds(begin, size)


def _layout(dims: tuple[int, ...], head_dim: int) -> Any:
    """Each warp has a row, or several have the same one, each lane some of its neighbouring columns."""
    tiling = plgpu.Tiling(((*dims, head_dim), (head_dim // _LANES,)))
    same = _WARPS // math.prod(dims)
    warps = (*(-3 for _ in dims), *(plgpu.Replicated(same) for _ in range(same > 1)))
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-2,), vector_dim=-1)
