"""The second kernel of Split-S attention: the pieces of each pair of head and request become one result.

A warpgroup takes four queries of one head, each warp a row, and loads several pieces at once: the time of
this kernel is the latency of its loads.
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
from jdllm.pallas.shared_lowering import lowered_once
from jdllm.pallas.split_attention.kernel import LOWEST, Partials
from jdllm.pallas.split_attention.tiles import Tiles
from jdllm.pallas.split_attention.work import Scalar, Shape, share_of, usual_pieces

_MOST_AT_ONCE = 20  # pieces whose loads are in flight together: of one, a lane has four numbers and more
_ROWS, _LANES = 4, 32  # a row for each warp


@lowered_once("shape", "tiles", "dtype", "chained")
def merge_partials(
    partials: Partials, first: jax.Array, shape: Shape, tiles: Tiles, dtype: jnp.dtype, *, chained: bool
) -> AttentionOutput:
    """Merge by log-sum-exp.

    Arguments:
    - `partials`: what the workers left, for the same `first`, `shape` and `tiles`.
    - `dtype`: of the output.
    - `chained`: as in `jdllm.pallas.chain`; `first` is older than the chain.

    Returns (o, m, l) for all padded queries.
    """
    queries = (shape.requests, shape.queries, shape.kv_heads * shape.group)
    per_query = jax.ShapeDtypeStruct(queries, jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, shape=shape, tiles=tiles, chained=chained),
        out_type=[jax.ShapeDtypeStruct((*queries, shape.head_dim), dtype), per_query, per_query],
        grid=(shape.pairs, shape.rows // _ROWS),
        grid_names=("pair", "rows"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="merge_split_attention",
    )
    return AttentionOutput(*kernel(*partials, first))


def _kernel(
    o_parts, m_parts, l_parts, first, o_ref, m_ref, l_ref, *, shape: Shape, tiles: Tiles, chained: bool
) -> None:
    let_next_start(chained)
    pair, row = lax.axis_index("pair"), lax.axis_index("rows") * _ROWS
    head, request = lax.div(pair, jnp.int32(shape.requests)), lax.rem(pair, jnp.int32(shape.requests))
    slot, count = _pieces(pair, head, request, first, shape, tiles)
    wait_for_kernel_before(chained)
    rows, layout = pl.ds(row, _ROWS), _layout(shape.head_dim)
    per_row = layout.reduce(1)
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
        o, total = o * _across(decay, shape.head_dim), total * decay
        for index, output, part, maximum in zip(indices, outputs, totals, maxima, strict=True):
            weight = jnp.where(index < count, jnp.exp2(maximum - highest), 0.0)
            o, total = o + output * _across(weight, shape.head_dim), total + part * weight
        return o, highest, total

    def splat(value: float, dims: tuple[int, ...], to: Any) -> Array:
        return plgpu.layout_cast(jnp.full(dims, value, jnp.float32), to)

    empty = (
        splat(0.0, (_ROWS, shape.head_dim), layout),
        splat(LOWEST, (_ROWS,), per_row),
        splat(0.0, (_ROWS,), per_row),
    )
    rounds = lax.div(count + (at_once - 1), jnp.int32(at_once))
    o, m, total = lax.fori_loop(0, rounds, visit, empty)
    seen = total > 0
    head = head * shape.group + lax.div(row, jnp.int32(shape.queries))
    queries = pl.ds(lax.rem(row, jnp.int32(shape.queries)), _ROWS)
    o = o * _across(1 / jnp.where(seen, total, 1.0), shape.head_dim)
    o_ref[request, queries, head] = o.astype(o_ref.dtype)
    m_ref[request, queries, head] = jnp.where(seen, m * math.log(2), -jnp.inf)
    l_ref[request, queries, head] = total


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


def _layout(head_dim: int) -> Any:
    """Each warp has a row, each lane some of its neighbouring columns."""
    tiling = plgpu.Tiling(((_ROWS, head_dim), (head_dim // _LANES,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _across(values: Array, head_dim: int) -> Array:
    filled = lax.broadcast_in_dim(values, (_ROWS, head_dim), [0])
    return plgpu.layout_cast(filled, _layout(head_dim))
