"""The Hopper kernel of packed attention, in Pallas for Mosaic GPU.

A block takes 128 rows of one head. One warpgroup loads keys and values by TMA into a ring of stages; two
others take 64 rows each. Two things overlap (FlashAttention-3, section 3): while one warpgroup occupies the
tensor cores, the other one does its softmax; and a warpgroup's softmax of a block of keys runs while its own
product of the probabilities before with their values is still under way.
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

from jdllm.pallas.attention.types import Keys, Queries

WARPGROUP_ROWS = 64
CONSUMERS = 2
BLOCK_ROWS = CONSUMERS * WARPGROUP_ROWS

_STRIP = 8  # columns of which each thread holds two
_LOADER_REGISTERS = 24
_CONSUMER_REGISTERS = 240
_ROWS = plgpu.Layout.WGMMA.reduce(1)

Scalar = Int[Array, ""]
Scores = Float[Array, "warpgroup_rows block_keys"]
PerRow = Float[Array, " warpgroup_rows"]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the keys are cut.

    - `keys`: of one block, a multiple of 64, or of 32 with `value_swizzle` 64.
    - `stages`: blocks of keys, and as many of values, in flight.
    - `value_swizzle`: bytes of a row of values that are shuffled together in shared memory.
    """

    keys: int = 128
    stages: int = 2
    value_swizzle: int = 128


class Ranges(NamedTuple):
    """Which keys the rows see, padded to whole blocks of rows; inside the kernel, references.

    - `rows`: the first key of each row, and the one after its last.
    - `blocks`: for each block of rows the lowest and the highest first key, the lowest and the highest end;
      rows that see nothing count in the second and third only, as an empty range at 0.
    """

    rows: Int[Array, "2 padded_rows"]
    blocks: Int[Array, "4 row_blocks"]


class _State(NamedTuple):
    """What a warpgroup carries from a block of keys to the next.

    - `o`: the sum of probabilities times values of all blocks but the last, relative to `m`.
    - `p`: the last block's probabilities, relative to `m`.
    - `m`: the largest score times log2(e).
    - `l`: sums of probabilities, each thread its own columns.
    """

    o: Float[Array, "warpgroup_rows head_dim"]
    p: Float[Array, "warpgroup_rows block_keys"]
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


def attend(
    q: Queries, k: Keys, v: Keys, ranges: Ranges, scale: float, tiles: Tiles
) -> tuple[Queries, Float[Array, "heads padded_rows"], Float[Array, "heads padded_rows"]]:
    """Attention of packed rows; `o`, `m` and `l` as of `AttentionOutput`, the last two by head."""
    rows, heads, head_dim = q.shape
    blocks = pl.cdiv(rows, BLOCK_ROWS)
    residual = jax.ShapeDtypeStruct((heads, blocks * BLOCK_ROWS), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, scale=scale * math.log2(math.e), tiles=tiles, group=heads // k.shape[1]),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype), residual, residual],
        scratch_types=list(_memory(tiles, head_dim, q.dtype)),
        grid=(heads, blocks),
        grid_names=("head", "block"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="packed_attention",
    )
    return kernel(q, k, v, *ranges)


def _memory(tiles: Tiles, head_dim: int, dtype: jnp.dtype) -> _Memory:
    def buffer(shape: tuple[int, ...], swizzle: int = 128) -> plgpu.SMEM:
        transforms = (
            plgpu.TilingTransform((8, swizzle // 2)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
        )
        return plgpu.SMEM(shape, dtype=dtype, transforms=transforms)

    def barriers(arrivals: int, number: int) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    stages = tiles.stages
    return _Memory(
        q=buffer((CONSUMERS, WARPGROUP_ROWS, head_dim)),
        k=buffer((stages, tiles.keys, head_dim)),
        v=buffer((stages, tiles.keys, head_dim), tiles.value_swizzle),
        q_full=barriers(1, CONSUMERS),
        k_full=barriers(1, stages),
        v_full=barriers(1, stages),
        k_free=barriers(CONSUMERS, stages),
        v_free=barriers(CONSUMERS, stages),
        turn=barriers(1, CONSUMERS),
    )


def _kernel(q, k, v, row_ranges, block_ranges, o, m, l, *memory, scale: float, tiles: Tiles, group: int):  # noqa: E741
    memory = _Memory(*memory)
    ranges = Ranges(row_ranges, block_ranges)
    block = lax.axis_index("block")
    first = ranges.blocks[0, block]
    steps = jnp.maximum(lax.div(ranges.blocks[3, block] - first + (tiles.keys - 1), jnp.int32(tiles.keys)), 1)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def _loader():
        plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
        _load(q, k, v, memory, first, steps, tiles, group)

    @pl.when(warpgroup < CONSUMERS)
    def _consumer():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        state = _consume(memory, ranges, first, steps, scale, tiles, q.dtype)
        _store(state, memory.q.at[warpgroup], o, m, l)


def _load(q, k, v, memory: _Memory, first: Scalar, steps: Scalar, tiles: Tiles, group: int) -> None:
    head = lax.axis_index("head")
    kv_head = lax.div(head, jnp.int32(group))
    for part in range(CONSUMERS):
        row = lax.axis_index("block") * BLOCK_ROWS + part * WARPGROUP_ROWS
        rows = q.at[pl.ds(row, WARPGROUP_ROWS), head]
        plgpu.copy_gmem_to_smem(rows, memory.q.at[part], memory.q_full.at[part])

    def step(j: Scalar, _: None) -> None:
        stage = lax.rem(j, jnp.int32(tiles.stages))
        keys = pl.ds(first + j * tiles.keys, tiles.keys)
        for source, to, full, free in (
            (k, memory.k, memory.k_full, memory.k_free),
            (v, memory.v, memory.v_full, memory.v_free),
        ):
            pl.when(j >= tiles.stages)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
            plgpu.copy_gmem_to_smem(source.at[keys, kv_head], to.at[stage], full.at[stage])

    lax.fori_loop(0, steps, step, None)


def _consume(
    memory: _Memory, ranges: Ranges, first: Scalar, steps: Scalar, scale: float, tiles: Tiles, dtype: jnp.dtype
) -> _State:
    """Attention of this warpgroup's rows, not yet divided by the sum of probabilities."""
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    other = CONSUMERS - 1 - warpgroup
    q = memory.q.at[warpgroup]
    start, end = (_row_bounds(ranges, line) for line in range(2))
    highest_start, lowest_end = ranges.blocks[1, block], ranges.blocks[2, block]

    def stage(j: Scalar | int) -> Scalar:
        return lax.rem(jnp.int32(j), jnp.int32(tiles.stages))

    def seen(scores: Scores, j: Scalar | int) -> Scores:
        """The scores, -inf where a row does not see a key."""
        key = first + j * tiles.keys

        def hide() -> Scores:
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + key
            visible = (column >= _across(start, scores)) & (column < _across(end, scores))
            return jnp.where(visible, scores, -jnp.inf)

        partly = (key < highest_start) | (key + tiles.keys > lowest_end)
        return lax.cond(partly, hide, lambda: scores)

    def softmax(scores: Scores, m: PerRow) -> tuple[Scores, PerRow, PerRow]:
        """Probabilities relative to the new largest score, that score, and the factor of what came before."""
        new_m = jnp.maximum(m, scores.max(axis=1) * scale)
        finite = jnp.where(new_m == -jnp.inf, 0.0, new_m)
        return jnp.exp2(scores * scale - _across(finite, scores)), new_m, jnp.exp2(m - finite)

    def first_block(scores_ref) -> tuple[Scores, PerRow]:
        plgpu.barrier_wait(memory.k_full.at[stage(0)])
        plgpu.barrier_wait(memory.turn.at[warpgroup])
        plgpu.wgmma(scores_ref, q, memory.k.at[stage(0)].transpose((1, 0)))
        plgpu.barrier_arrive(memory.turn.at[other])
        scores = seen(scores_ref[...], 0)
        plgpu.barrier_arrive(memory.k_free.at[stage(0)])
        p, m, _ = softmax(scores, plgpu.layout_cast(jnp.full(WARPGROUP_ROWS, -jnp.inf, jnp.float32), _ROWS))
        return p, m

    def next_block(j: Scalar, state: _State) -> _State:
        def multiply(refs) -> None:
            scores_ref, o_ref, p_ref, m_ref, l_ref = refs
            plgpu.barrier_wait(memory.k_full.at[stage(j)])
            plgpu.barrier_wait(memory.turn.at[warpgroup])
            plgpu.wgmma(scores_ref, q, memory.k.at[stage(j)].transpose((1, 0)))
            plgpu.barrier_wait(memory.v_full.at[stage(j - 1)])
            plgpu.wgmma(o_ref, state.p, memory.v.at[stage(j - 1)])
            plgpu.barrier_arrive(memory.turn.at[other])
            scores = seen(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1), j)
            plgpu.barrier_arrive(memory.k_free.at[stage(j)])
            p, m, decay = softmax(scores, state.m)
            l_ref[...] = state.l * _across(decay, state.l) + _by_thread(p)
            m_ref[...] = m
            o = plgpu.wgmma_accumulator_load(o_ref, wait_n=0)
            plgpu.barrier_arrive(memory.v_free.at[stage(j - 1)])
            o_ref[...] = o * _across(decay, o)
            p_ref[...] = p.astype(dtype)

        empty = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, tiles.keys), jnp.float32), plgpu.Layout.WGMMA)
        refs = (plgpu.ACC.init(empty), plgpu.ACC.init(state.o), state.p, state.m, state.l)
        return _State(*pl.run_state(multiply)(refs)[1:])

    pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(memory.turn.at[0]))
    plgpu.barrier_wait(memory.q_full.at[warpgroup])
    scores_type = plgpu.ACC((WARPGROUP_ROWS, tiles.keys), jnp.float32)
    p, m = pl.run_scoped(first_block, scores_type)
    head_dim = memory.q.shape[-1]
    o = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)
    state = _State(o, p.astype(dtype), m, _by_thread(p))
    state = lax.fori_loop(1, steps, next_block, state)

    def last_product(o_ref) -> None:
        plgpu.barrier_wait(memory.v_full.at[stage(steps - 1)])
        plgpu.wgmma(o_ref, state.p, memory.v.at[stage(steps - 1)])

    return state._replace(o=pl.run_state(last_product)(plgpu.ACC.init(state.o)))


def _store(state: _State, buffer, o, m, l) -> None:  # noqa: E741
    """Write this warpgroup's rows; `buffer` is shared memory that nobody reads any more."""
    head = lax.axis_index("head")
    row = lax.axis_index("block") * BLOCK_ROWS + lax.axis_index("warpgroup") * WARPGROUP_ROWS
    rows = pl.ds(row, WARPGROUP_ROWS)
    total = state.l.sum(axis=1)
    m[head, rows] = state.m * math.log(2)
    l[head, rows] = total
    inverse = 1 / jnp.where(total == 0, 1.0, total)
    buffer[...] = (state.o * _across(inverse, state.o)).astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, o.at[rows, head])
    plgpu.wait_smem_to_gmem(0)


def _row_bounds(ranges: Ranges, line: int) -> Int[Array, " warpgroup_rows"]:
    row = lax.axis_index("block") * BLOCK_ROWS + lax.axis_index("warpgroup") * WARPGROUP_ROWS
    rows = ranges.rows.at[line, pl.ds(row, WARPGROUP_ROWS)]
    return plgpu.load(rows, layout=_ROWS, optimized=False)


def _by_thread(p: Scores) -> Float[Array, "warpgroup_rows strip"]:
    """Sums of columns that a thread holds."""
    strips = [p[:, column : column + _STRIP] for column in range(0, p.shape[1], _STRIP)]
    return functools.reduce(jnp.add, strips)


def _across(values: PerRow, like: Array) -> Array:
    return lax.broadcast_in_dim(values, like.shape, [0])
