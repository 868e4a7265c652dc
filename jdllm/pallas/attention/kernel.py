"""The Hopper kernel of packed attention, in Pallas for Mosaic GPU.

A block takes 128 rows of one head. One warpgroup loads keys and values by TMA into a ring of stages; two
others take 64 rows each. Two things overlap (FlashAttention-3, section 3): while one warpgroup occupies the
tensor cores, the other one does its softmax; and a warpgroup's softmax of a block of keys runs while its own
product of the probabilities before with their values is still under way. Two blocks of a cluster load each
tile of keys and values once between them.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jdllm.pallas.attention.ranges import BLOCK_ROWS, CLUSTER, CLUSTER_ROWS, CONSUMERS, Ranges
from jdllm.pallas.attention.types import Keys, Queries
from jdllm.pallas.hopper import STRIP, WARPGROUP_ROWS, consumer_registers
from jdllm.pallas.products import Output, Products, Scores
from jdllm.pallas.ring import COMPILER_PARAMS, drain, free_barriers, in_roles, swizzled
from jdllm.pallas.shared_lowering import lowered_once

_LOADER_REGISTERS = 24
_ROWS = plgpu.Layout.WGMMA.reduce(1)

Scalar = Int[Array, ""]
PerRow = Float[Array, " warpgroup_rows"]
RowInts = Int[Array, " warpgroup_rows"]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the keys are cut.

    - `keys`: of one block, a multiple of 64.
    - `stages`: blocks of keys, and as many of values, in flight.
    """

    keys: int = 128
    stages: int = 2


class _State(NamedTuple):
    """What a warpgroup carries from a block of keys to the next.

    - `o`: the sum of probabilities times values of all blocks but the last, relative to `m`.
    - `p`: the last block's probabilities, relative to `m`.
    - `m`: the largest score times log2(e).
    - `l`: sums of probabilities, each thread its own columns.
    """

    o: Output
    p: Scores
    m: PerRow
    l: Float[Array, "warpgroup_rows strip"]  # noqa: E741


class _Memory(NamedTuple):
    """Shared memory of a block, and barriers: a stage is full, a stage is free, a warpgroup may multiply."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any


class _Span(NamedTuple):
    """The keys that a cluster visits: the first one, and how many blocks, at least one."""

    first: Scalar
    steps: Scalar


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What every warpgroup knows before it starts; `scale` is that of scores to the base 2."""

    tiles: Tiles
    products: Products
    scale: float
    group: int

    def stage(self, step: Scalar) -> Scalar:
        return lax.rem(step, jnp.int32(self.tiles.stages))

    def span(self, ranges: Ranges) -> _Span:
        cluster = lax.axis_index("cluster")
        first, end = ranges.clusters[0, cluster], ranges.clusters[3, cluster]
        steps = lax.div(end - first + (self.tiles.keys - 1), jnp.int32(self.tiles.keys))
        return _Span(first, jnp.maximum(steps, 1))


@lowered_once("scale", "tiles", "products")
def attend(
    q: Queries, k: Keys, v: Keys, ranges: Ranges, scale: float, tiles: Tiles, products: Products
) -> tuple[Queries, Float[Array, "heads padded_rows"], Float[Array, "heads padded_rows"]]:
    """Attention of packed rows: the fields of `AttentionOutput`, `m` and `l` by head.

    Arguments:
    - `q`, `k`, `v`: bfloat16 or float16; rows and keys multiples of 8.
    - `products`: how tiles are multiplied.
    """
    heads, head_dim = q.shape[1:]
    launch = _Launch(tiles, products, scale * math.log2(math.e), heads // k.shape[1])
    residual = jax.ShapeDtypeStruct((heads, ranges.rows.shape[1]), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype), residual, residual],
        scratch_types=list(_memory(tiles, head_dim, q.dtype)),
        grid=(heads, ranges.clusters.shape[1]),
        grid_names=("head", "cluster"),
        cluster=(CLUSTER,),
        cluster_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="packed_attention",
    )
    return kernel(q, k, v, *ranges)


def _memory(tiles: Tiles, head_dim: int, dtype: jnp.dtype) -> _Memory:
    stages, keys = tiles.stages, swizzled((tiles.stages, tiles.keys, head_dim), dtype)
    free = free_barriers(stages, CONSUMERS, (CLUSTER,), ("block",))
    return _Memory(
        q=swizzled((CONSUMERS, WARPGROUP_ROWS, head_dim), dtype),
        k=keys,
        v=keys,
        q_full=plgpu.Barrier(num_barriers=CONSUMERS),
        k_full=plgpu.Barrier(num_barriers=stages),
        v_full=plgpu.Barrier(num_barriers=stages),
        k_free=free,
        v_free=free,
        turn=plgpu.Barrier(num_barriers=CONSUMERS),
    )


def _kernel(q, k, v, row_ranges, cluster_ranges, *refs, launch: _Launch) -> None:
    out, memory = refs[: -len(_Memory._fields)], _Memory(*refs[-len(_Memory._fields) :])
    ranges = Ranges(row_ranges, cluster_ranges)
    span = launch.span(ranges)
    in_roles(
        CONSUMERS,
        (_LOADER_REGISTERS, consumer_registers(CONSUMERS, _LOADER_REGISTERS)),
        lambda: _load(q, k, v, memory, span, launch),
        lambda: _store(
            _consume(memory, ranges, span, launch), memory.q.at[lax.axis_index("warpgroup")], *out
        ),
    )


def _load(q, k, v, memory: _Memory, span: _Span, launch: _Launch) -> None:
    """Fetch this block's rows, and its half of each block of keys and values as soon as there is room."""
    tiles, head = launch.tiles, lax.axis_index("head")
    for part in range(CONSUMERS):
        rows = pl.ds(_first_row() + part * WARPGROUP_ROWS, WARPGROUP_ROWS)
        plgpu.copy_gmem_to_smem(q.at[rows, head], memory.q.at[part], memory.q_full.at[part])

    def step(j: Scalar, _: None) -> None:
        stage = launch.stage(j)
        keys = pl.ds(span.first + j * tiles.keys, tiles.keys)
        for source, to, full, free in (
            (k, memory.k, memory.k_full, memory.k_free),
            (v, memory.v, memory.v_full, memory.v_free),
        ):
            pl.when(j >= tiles.stages)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
            part = source.at[keys, lax.div(head, jnp.int32(launch.group))]
            plgpu.copy_gmem_to_smem(part, to.at[stage], full.at[stage], collective_axes="block")

    lax.fori_loop(0, span.steps, step, None)

    drain(span.steps, tiles.stages, memory.k_free, memory.v_free)


def _consume(memory: _Memory, ranges: Ranges, span: _Span, launch: _Launch) -> _State:
    """Attention of this warpgroup's rows, not yet divided by the sum of probabilities."""
    warpgroup, products = lax.axis_index("warpgroup"), launch.products
    q, keys = memory.q.at[warpgroup], launch.tiles.keys
    bounds = [_row_bounds(ranges, line) for line in range(2)]

    def await_turn(j: Scalar) -> Any:
        plgpu.barrier_wait(memory.k_full.at[launch.stage(j)])
        plgpu.barrier_wait(memory.turn.at[warpgroup])
        return memory.k.at[launch.stage(j)]

    def pass_turn() -> None:
        plgpu.barrier_arrive(memory.turn.at[CONSUMERS - 1 - warpgroup])

    def values(j: Scalar) -> Any:
        plgpu.barrier_wait(memory.v_full.at[launch.stage(j)])
        return memory.v.at[launch.stage(j)]

    def probabilities(scores: Scores, j: Scalar, m: PerRow) -> tuple[Scores, PerRow, PerRow]:
        plgpu.barrier_arrive(memory.k_free.at[launch.stage(j)])
        return _softmax(_seen(scores, span.first + j * keys, bounds, ranges), m, launch.scale)

    def first_block() -> _State:
        scores = products.scores(q, await_turn(jnp.int32(0)), pass_turn)
        p, m, _ = probabilities(scores, jnp.int32(0), _constant((WARPGROUP_ROWS,), -jnp.inf))
        return _State(_constant(q.shape, 0.0), p.astype(q.dtype), m, _by_thread(p))

    def next_block(j: Scalar, state: _State) -> _State:
        def use(scores: Scores) -> tuple[Scores, PerRow, PerRow, Array]:
            p, m, decay = probabilities(scores, j, state.m)
            return p, m, decay, state.l * _across(decay, state.l) + _by_thread(p)

        like = (_constant(state.p.shape, 0.0), state.m, state.m, state.l)
        o, (p, m, decay, total) = products.both(
            q, await_turn(j), state.o, state.p, lambda: values(j - 1), pass_turn, use, like
        )
        plgpu.barrier_arrive(memory.v_free.at[launch.stage(j - 1)])
        return _State(o * _across(decay, o), p.astype(q.dtype), m, total)

    # Scores are a block of keys ahead of values: the first come before the loop, the last values after it.
    # The first warpgroup begins. A block that a row does not see at all leaves it as it is (`_softmax`).
    pl.when(warpgroup == 1)(pass_turn)
    plgpu.barrier_wait(memory.q_full.at[warpgroup])
    state = lax.fori_loop(1, span.steps, next_block, first_block())
    o = products.accumulate(state.o, state.p, values(span.steps - 1))
    plgpu.barrier_arrive(memory.v_free.at[launch.stage(span.steps - 1)])
    pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(memory.turn.at[0]))
    return state._replace(o=o)


def _seen(scores: Scores, key: Scalar, bounds: list[RowInts], ranges: Ranges) -> Scores:
    """The scores with keys from `key` on, -inf where a row does not see one."""

    def hide() -> Scores:
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + key
        start, end = (_across(bound, scores) for bound in bounds)
        return jnp.where((column >= start) & (column < end), scores, -jnp.inf)

    cluster = lax.axis_index("cluster")
    partly = (key < ranges.clusters[1, cluster]) | (key + scores.shape[1] > ranges.clusters[2, cluster])
    return lax.cond(partly, hide, lambda: scores)


def _softmax(scores: Scores, m: PerRow, scale: float) -> tuple[Scores, PerRow, PerRow]:
    """Probabilities relative to the new largest score, that score, and the factor of what came before."""
    new_m = jnp.maximum(m, scores.max(axis=1) * scale)
    # A row that has seen nothing yet has -inf only: minus 0 that weighs 0, minus itself it is no number.
    finite = jnp.where(new_m == -jnp.inf, 0.0, new_m)
    return jnp.exp2(scores * scale - _across(finite, scores)), new_m, jnp.exp2(m - finite)


def _store(state: _State, buffer: Any, o, m, l) -> None:  # noqa: E741
    """Write this warpgroup's rows; `buffer` is shared memory that nobody reads any more."""
    head, rows = lax.axis_index("head"), _rows()
    total = state.l.sum(axis=1)
    m[head, rows] = state.m * math.log(2)
    l[head, rows] = total
    inverse = 1 / jnp.where(total == 0, 1.0, total)
    buffer[...] = (state.o * _across(inverse, state.o)).astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, o.at[rows, head])
    plgpu.wait_smem_to_gmem(0)


def _first_row() -> Scalar:
    """The first row of this block."""
    return lax.axis_index("cluster") * CLUSTER_ROWS + lax.axis_index("block") * BLOCK_ROWS


def _row_bounds(ranges: Ranges, line: int) -> RowInts:
    bounds: Any = ranges.rows.at[line, _rows()]
    return plgpu.load(bounds, layout=_ROWS, optimized=False)


def _rows() -> pl.Slice:
    """The rows of this warpgroup."""
    return pl.ds(_first_row() + lax.axis_index("warpgroup") * WARPGROUP_ROWS, WARPGROUP_ROWS)


def _by_thread(p: Scores) -> Float[Array, "warpgroup_rows strip"]:
    """Sums of columns that a thread holds."""
    strips = [p[:, column : column + STRIP] for column in range(0, p.shape[1], STRIP)]
    return functools.reduce(jnp.add, strips)


def _constant(shape: tuple[int, ...], value: float) -> Array:
    layout = _ROWS if len(shape) == 1 else plgpu.Layout.WGMMA
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _across(values: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(values, like.shape, [0])
