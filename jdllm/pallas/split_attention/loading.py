"""The warpgroup of the Hopper kernel of Split-S attention that loads queries, keys and values."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdllm.pallas.chain import wait_for_kernel_before
from jdllm.pallas.hopper import STRIP
from jdllm.pallas.ring import drain
from jdllm.pallas.split_attention.launch import Inputs, Launch, Ring
from jdllm.pallas.split_attention.tiles import TILE
from jdllm.pallas.split_attention.work import Piece, Scalar


def load(inputs: Inputs, ring: Ring, launch: Launch) -> None:
    """Fetch the queries of each piece and its live steps, each as soon as there is room."""
    tiles = launch.tiles

    def fill(piece: Piece, step: Scalar, count: Scalar) -> None:
        stage = launch.stage(count)
        pl.when(count >= tiles.stages)(lambda: plgpu.barrier_wait(ring.free.at[stage]))
        for i in range(tiles.step_tiles):
            # A tile beyond the piece is masked, but its values must be numbers: the last one, once more.
            tile = jnp.minimum(piece.begin + step * tiles.step_tiles + i, piece.end - 1)
            _load_tile(inputs, piece, tile, (stage, pl.ds(i * TILE, TILE)), ring, launch)

    def visit(piece: Piece, pieces: Scalar, steps: Scalar) -> Scalar:
        def step(k: Scalar, count: Scalar) -> Scalar:
            live = functools.reduce(jnp.add, launch.live_rows(piece, k, inputs).counts) > 0
            pl.when(live)(lambda: fill(piece, k, count))
            return count + live.astype(jnp.int32)

        # As many keys as there are stages need no more than that the piece before is done with, queries too.
        all_steps = launch.steps(piece)
        ahead = jnp.minimum(all_steps, tiles.stages)
        steps = lax.fori_loop(0, ahead, step, steps)
        pl.when(pieces > 0)(lambda: plgpu.barrier_wait(ring.q_free))
        _load_queries(inputs.q, piece, ring, launch)
        return lax.fori_loop(ahead, all_steps, step, steps)

    pieces, steps = launch.for_each_piece(inputs.first, visit)
    wait_for_kernel_before(launch.chained)  # whatever there is to do: the next kernel relies on it
    pl.when(pieces > 0)(lambda: plgpu.barrier_wait(ring.q_free))
    drain(steps, tiles.stages, ring.free)


def _load_tile(
    inputs: Inputs, piece: Piece, tile: Scalar, at: tuple[Scalar, pl.Slice], ring: Ring, launch: Launch
) -> None:
    """Fetch a tile's keys and values from where its entry says."""
    shape = launch.shape
    entry, place = launch.place(tile)
    page = inputs.pages[entry]

    def copy(k: Any, v: Any) -> None:
        for source, to in ((k, ring.k), (v, ring.v)):
            plgpu.copy_gmem_to_smem(source, to.at[at], ring.full.at[at[0]], collective_axes="row_block")

    def from_pool() -> None:
        page_of_layer = inputs.layer[0] * shape.pages + page
        rows = pl.ds((page_of_layer * shape.kv_heads + piece.head) * shape.page_rows + place * TILE, TILE)
        copy(inputs.k.at[rows], inputs.v.at[rows])

    def from_fresh(k: Any, v: Any) -> None:
        wait_for_kernel_before(launch.chained)
        rows = pl.ds(launch.first_copied(page) + place * TILE, TILE)
        columns = pl.ds(piece.head * shape.head_dim, shape.head_dim)
        copy(k.at[rows, columns], v.at[rows, columns])

    if inputs.fresh_k is None:
        from_pool()
    else:
        lax.cond(page >= 0, from_pool, functools.partial(from_fresh, inputs.fresh_k, inputs.fresh_v))


def _load_queries(q: Any, piece: Piece, ring: Ring, launch: Launch) -> None:
    """Fetch this block's part of the queries of the piece's heads."""
    wait_for_kernel_before(launch.chained)
    if launch.shape.single:
        _load_heads(q, piece, ring, launch)
    else:
        _fold_heads(q, piece, ring, launch)


def _load_heads(q: Any, piece: Piece, ring: Ring, launch: Launch) -> None:
    """Fetch the heads of a single query; rows beyond, whose results nobody reads, may hold anything."""
    tiles, shape = launch.tiles, launch.shape
    rows = min(shape.tile_rows, tiles.block_rows)
    first = lax.div(shape.first_head(piece.request, piece.head), jnp.int32(STRIP)) * STRIP
    source = q.at[pl.ds(first + lax.axis_index("row_block") * tiles.block_rows, rows)]
    plgpu.copy_gmem_to_smem(source, ring.q.at[pl.ds(0, rows)], ring.q_full)


def _fold_heads(q: Any, piece: Piece, ring: Ring, launch: Launch) -> None:
    """Fold the queries of the piece's heads into the rows of this block; rows beyond repeat the last ones."""
    tiles, shape, run = launch.tiles, launch.shape, launch.run
    for begin in range(0, tiles.block_rows, run):
        row = jnp.minimum(lax.axis_index("row_block") * tiles.block_rows + begin, shape.rows - run)
        head = piece.head * shape.group + lax.div(row, jnp.int32(shape.queries))
        query = piece.request * shape.queries + lax.rem(row, jnp.int32(shape.queries))
        source = q.at[pl.ds(query, run), pl.ds(head * shape.head_dim, shape.head_dim)]
        plgpu.copy_gmem_to_smem(source, ring.q.at[pl.ds(begin, run)], ring.q_full)
