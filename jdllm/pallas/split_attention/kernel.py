"""The Hopper kernel of Split-S attention, in Pallas for Mosaic GPU.

One warpgroup of a block loads keys and values by TMA into a ring of stages; others multiply (wgmma) and keep
an online softmax in registers. Where the pool has 8 bits, one more widens what is loaded (`loading`). The
heads of a group are folded into the rows of one tile, so that keys are read once. Blocks are persistent: a
worker walks over an equal part of all keys (`work`) and leaves the unnormalised output, the maximum and the
sum of each piece, which `merge` puts together.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdllm.pallas.chain import let_next_start
from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.products import Products
from jdllm.pallas.ring import COMPILER_PARAMS, free_barriers, in_roles, release, swizzled
from jdllm.pallas.shared_lowering import lowered_once
from jdllm.pallas.split_attention.launch import Inputs, Launch, Ring, Stored
from jdllm.pallas.split_attention.loading import load, widen
from jdllm.pallas.split_attention.softmax import LiveRows, State, across, masked, no_state
from jdllm.pallas.split_attention.tiles import TILE, Tiles
from jdllm.pallas.split_attention.work import Partials, Piece, Scalar, Shape
from jdllm.quantised import FLOAT8


@lowered_once("shape", "tiles", "scale", "products", "fresh_unit", "chained")
def attention_partials(
    inputs: Inputs,
    shape: Shape,
    tiles: Tiles,
    scale: float,
    products: Products,
    *,
    fresh_unit: int,
    chained: bool,
) -> Partials:
    """Attend to the pieces of all workers.

    Arguments:
    - `inputs`: bfloat16 or float16 operands; of a pool in 8 bits bfloat16 and floats of 8 bits.
    - `shape`: with at most `tiles.rows` rows of queries that are loaded for a pair.
    - `tiles`: the cut.
    - `scale`: factor of the scores.
    - `products`: how tiles are multiplied.
    - `fresh_unit`: fresh rows of an entry begin at a multiple of it.
    - `chained`: part of a chain of kernels, where all but queries and fresh rows is older.
    """
    launch = Launch(tiles, shape, scale, products, fresh_unit, chained)
    pieces = shape.pieces(tiles)
    per_row = jax.ShapeDtypeStruct((pieces, tiles.rows), jnp.float32)
    leaves, given = jax.tree.flatten(inputs)
    scratch, shared = jax.tree.flatten(_ring(launch, inputs.q.dtype))
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch, given=given, shared=shared),
        out_type=[jax.ShapeDtypeStruct((*per_row.shape, shape.head_dim), jnp.float32), per_row, per_row],
        scratch_types=scratch,
        grid=(tiles.workers,),
        grid_names=("worker",),
        cluster=(tiles.row_blocks,),
        cluster_names=("row_block",),
        num_threads=tiles.consumers + (2 if launch.in_8_bits else 1),
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="split_attention",
    )
    return Partials(*kernel(*leaves))


def _ring(launch: Launch, dtype: jnp.dtype) -> Ring:
    """Shared memory and barriers.

    Arguments:
    - `dtype`: of what is multiplied.
    """
    tiles, head_dim = launch.tiles, launch.shape.head_dim
    keys = tiles.stages, tiles.step_keys, head_dim
    # Each block widens for itself.
    sharing = 1 if launch.in_8_bits else tiles.row_blocks
    return Ring(
        q=swizzled((tiles.block_rows, head_dim), dtype),
        k=swizzled(keys, dtype),
        v=swizzled(keys, dtype),
        q_full=plgpu.Barrier(num_arrivals=launch.query_copies),
        q_free=plgpu.Barrier(num_arrivals=tiles.consumers),
        full=plgpu.Barrier(num_arrivals=2 * tiles.step_tiles, num_barriers=tiles.stages),
        free=free_barriers(tiles.stages, tiles.row_groups, (sharing,), ("row_block",)),
        turn=plgpu.Barrier(num_arrivals=2),
        stored=_stored(launch) if launch.in_8_bits else None,
    )


def _stored(launch: Launch) -> Stored:
    """The same of what is stored in 8 bits."""
    tiles = launch.tiles
    keys = (tiles.stored_stages, tiles.step_keys, launch.shape.head_dim)
    scales = plgpu.SMEM((tiles.stored_stages * tiles.step_keys,), dtype=jnp.bfloat16)
    return Stored(
        k=swizzled(keys, FLOAT8),
        v=swizzled(keys, FLOAT8),
        k_scales=scales,
        v_scales=scales,
        full=plgpu.Barrier(num_arrivals=4 * tiles.step_tiles, num_barriers=tiles.stored_stages),
        free=free_barriers(tiles.stored_stages, 1, (tiles.row_blocks,), ("row_block",)),
    )


def _kernel(*refs, launch: Launch, given: Any, shared: Any) -> None:
    """The kernel of a block.

    Arguments:
    - `refs`: inputs, outputs, and shared memory with barriers.
    - `given`, `shared`: the trees of the first and of the last ones.
    """
    results = given.num_leaves + len(Partials._fields)
    inputs: Inputs = jax.tree.unflatten(given, refs[: given.num_leaves])
    out, ring = Partials(*refs[given.num_leaves : results]), jax.tree.unflatten(shared, refs[results:])
    let_next_start(launch.chained)
    in_roles(
        launch.tiles.consumers,
        launch.tiles.registers,
        functools.partial(load, inputs, ring, launch),
        functools.partial(_consume, inputs, ring, out, launch),
        *([functools.partial(widen, inputs, ring, launch)] if launch.in_8_bits else []),
    )


def _consume(inputs: Inputs, ring: Ring, out: Partials, launch: Launch) -> None:
    """Attend with this warpgroup's rows to its steps of every piece."""
    tiles, warpgroup = launch.tiles, lax.axis_index("warpgroup")
    row_group = lax.rem(warpgroup, jnp.int32(tiles.row_groups))
    key_group = lax.div(warpgroup, jnp.int32(tiles.row_groups))
    rows = pl.ds(row_group * WARPGROUP_ROWS, WARPGROUP_ROWS)
    row = lax.axis_index("row_block") * tiles.block_rows + row_group * WARPGROUP_ROWS

    def take_turn() -> None:
        if launch.alternates:
            plgpu.barrier_arrive(ring.turn)
            plgpu.barrier_wait(ring.turn)

    def visit(piece: Piece, pieces: Scalar, steps: Scalar) -> Scalar:
        plgpu.barrier_wait(ring.q_full)
        # The second warpgroup is half a step behind: one multiplies while the other one is at its softmax.
        pl.when(row_group == 1)(take_turn)

        def step(k: Scalar, carry: tuple[Scalar, LiveRows, State]) -> tuple[Scalar, LiveRows, State]:
            count, live_rows, state = carry
            next_rows = launch.live_rows(piece, k + 1, inputs)  # arrives while this step is computed
            live = functools.reduce(jnp.add, live_rows.counts) > 0
            mine = live & (lax.rem(count, jnp.int32(tiles.key_groups)) == key_group)
            stage = launch.stage(count)

            def attend(state: State) -> State:
                return _attend(ring.q.at[rows], state, live_rows, ring, stage, take_turn, launch)

            state = lax.cond(mine, attend, lambda state: state, state)
            return count + live.astype(jnp.int32), next_rows, state

        start = (steps, launch.live_rows(piece, jnp.int32(0), inputs), no_state(launch.shape.head_dim))
        count, _, state = lax.fori_loop(0, launch.steps(piece), step, start)
        pl.when(row_group == 0)(take_turn)
        release(ring.q_free)  # also of a piece of whose steps none was this warpgroup's
        slot = (lax.axis_index("worker") + piece.pair) * tiles.key_groups + key_group
        at = pl.ds(row, WARPGROUP_ROWS)
        out.o[slot, at] = state.o
        out.m[slot, at] = state.m * (launch.scale * math.log2(math.e))
        out.l[slot, at] = state.l
        return count

    launch.for_each_piece(inputs.first, visit)


def _attend(
    q: Any,
    state: State,
    live: LiveRows,
    ring: Ring,
    stage: Scalar,
    take_turn: Callable[[], None],
    launch: Launch,
) -> State:
    """Add the keys of one stage to an online softmax."""
    factor = launch.scale * math.log2(math.e)
    plgpu.barrier_wait(ring.full.at[stage])
    scores = launch.products.scores(q, ring.k.at[stage], take_turn)
    partial = functools.reduce(jnp.minimum, live.counts) < TILE
    scores = lax.cond(partial, functools.partial(masked, live=live), lambda x: x, scores)
    # The largest score is finite from the beginning: what is not live weighs 0, also where nothing else is.
    m = jnp.maximum(state.m, scores.max(axis=1))
    p = jnp.exp2(scores * factor - across(m * factor, scores.shape[1]))
    decay = jnp.exp2((state.m - m) * factor)
    o = state.o * across(decay, state.o.shape[1])
    total = state.l * decay + p.sum(axis=1)
    p = p.astype(q.dtype)
    # The softmax ends before the turn does: the other warpgroup's products run meanwhile.
    o, m, total, p = lax.optimization_barrier((o, m, total, p))
    take_turn()
    o = launch.products.accumulate(o, p, ring.v.at[stage])
    plgpu.barrier_arrive(ring.free.at[stage])
    return State(o, m, total)
