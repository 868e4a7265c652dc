"""The warpgroups of the Hopper kernel of Split-S attention that load queries, keys and values.

One loads. Keys and values that the pool stores in 8 bits go through a second one, which widens and scales
them in registers. So those that multiply find 16 bits in shared memory, as they do with other pools.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdllm.pallas.chain import wait_for_kernel_before
from jdllm.pallas.hopper import STRIP
from jdllm.pallas.ring import drain
from jdllm.pallas.split_attention.launch import Inputs, Launch, Ring, Stored
from jdllm.pallas.split_attention.tiles import TILE
from jdllm.pallas.split_attention.work import Piece, Scalar

_At = tuple[Scalar, pl.Slice]
"""Where a tile is in a ring: its stage, and its rows there."""

_COPIES = 2  # of a tile: keys and values


def load(inputs: Inputs, ring: Ring, launch: Launch) -> None:
    """Fetch the queries of each piece and its live steps, each as soon as there is room."""
    tiles, stored = launch.tiles, ring.stored
    stages, free = (tiles.stages, ring.free) if stored is None else (tiles.stored_stages, stored.free)

    def visit(piece: Piece, pieces: Scalar, steps: Scalar) -> Scalar:
        def fill(step: Scalar, count: Scalar) -> None:
            stage = lax.rem(count, jnp.int32(stages))
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
            for i, tile in enumerate(launch.loaded_tiles(piece, step)):
                at = stage, pl.ds(i * TILE, TILE)
                if stored is None:
                    _load_tile(inputs, piece, tile, at, ring, launch)
                else:
                    _load_stored(inputs, piece, tile, at, stored, launch)

        # As many keys as there are stages need no more than that the piece before is done with, queries too.
        step, all_steps = launch.when_live(piece, inputs, fill), launch.steps(piece)
        ahead = jnp.minimum(all_steps, stages)
        steps = lax.fori_loop(0, ahead, step, steps)
        pl.when(pieces > 0)(lambda: plgpu.barrier_wait(ring.q_free))
        _load_queries(inputs.q, piece, ring, launch)
        return lax.fori_loop(ahead, all_steps, step, steps)

    pieces, steps = launch.for_each_piece(inputs.first, visit)
    wait_for_kernel_before(launch.chained)  # whatever there is to do: the next kernel relies on it
    pl.when(pieces > 0)(lambda: plgpu.barrier_wait(ring.q_free))
    drain(steps, stages, free)


def widen(inputs: Inputs, ring: Ring, launch: Launch) -> None:
    """Fill the ring of 16 bits from the one of 8, and with fresh rows: what the other warpgroups read."""
    tiles, stored = launch.tiles, ring.stored
    assert stored is not None

    def visit(piece: Piece, _: Scalar, steps: Scalar) -> Scalar:
        def fill(step: Scalar, count: Scalar) -> None:
            stage, source = launch.stage(count), launch.stored_stage(count)
            pl.when(count >= tiles.stages)(lambda: plgpu.barrier_wait(ring.free.at[stage]))
            plgpu.barrier_wait(stored.full.at[source])
            loaded = [launch.place(tile) for tile in launch.loaded_tiles(piece, step)]
            pages = [inputs.pages[entry] for entry, _ in loaded]
            for i, (page, (_, place)) in enumerate(zip(pages, loaded, strict=True)):
                at, source_at = ((of_ring, pl.ds(i * TILE, TILE)) for of_ring in (stage, source))
                _when_stored(
                    inputs,
                    page,
                    functools.partial(_widen_tile, stored, source_at, ring, at, launch),
                    functools.partial(_load_fresh, inputs, piece, page, place, at, ring, launch),
                )
            plgpu.commit_smem()  # all warps have read and written
            plgpu.barrier_arrive(stored.free.at[source])
            for page in pages:
                pl.when(page >= 0)(lambda: _arrive(ring.full.at[stage], _COPIES))

        return lax.fori_loop(0, launch.steps(piece), launch.when_live(piece, inputs, fill), steps)

    _, steps = launch.for_each_piece(inputs.first, visit)
    drain(steps, tiles.stages, ring.free)


def _widen_tile(stored: Stored, source: _At, ring: Ring, to: _At, launch: Launch) -> None:
    scales = _scales_at(source, launch)
    for values, of_rows, wide in ((stored.k, stored.k_scales, ring.k), (stored.v, stored.v_scales, ring.v)):
        wide[to] = launch.products.widened(values.at[source], of_rows.at[scales], wide.dtype)


def _scales_at(tile: _At, launch: Launch) -> pl.Slice:
    """Where the scales of a tile are among those of all stages."""
    stage, rows = tile
    return pl.ds(stage * launch.tiles.step_keys + rows.start, TILE)


def _when_stored(
    inputs: Inputs, page: Scalar, of_pool: Callable[[], None], of_fresh: Callable[[], None]
) -> None:
    """Call one of two functions for an entry: that of its page, or that of its fresh rows."""
    if inputs.fresh is None:
        of_pool()
    else:
        lax.cond(page >= 0, of_pool, of_fresh)


def _arrive(barrier: Any, times: int) -> None:
    for _ in range(times):
        plgpu.barrier_arrive(barrier)


def _load_tile(inputs: Inputs, piece: Piece, tile: Scalar, at: _At, ring: Ring, launch: Launch) -> None:
    """Fetch a tile's keys and values from where its entry says."""
    entry, place = launch.place(tile)
    page = inputs.pages[entry]

    def from_pool() -> None:
        rows = _pool_rows(inputs, piece, page, place, launch)
        _copy((inputs.k.at[rows], inputs.v.at[rows]), (ring.k.at[at], ring.v.at[at]), ring.full.at[at[0]])

    fresh = functools.partial(_load_fresh, inputs, piece, page, place, at, ring, launch)
    _when_stored(inputs, page, from_pool, fresh)


def _load_stored(inputs: Inputs, piece: Piece, tile: Scalar, at: _At, stored: Stored, launch: Launch) -> None:
    """Fetch a tile's keys and values in 8 bits, and their scales; say at once that fresh rows are there."""
    entry, place = launch.place(tile)
    page, full = inputs.pages[entry], stored.full.at[at[0]]

    def from_pool() -> None:
        rows = _pool_rows(inputs, piece, page, place, launch)
        _copy((inputs.k.at[rows], inputs.v.at[rows]), (stored.k.at[at], stored.v.at[at]), full)
        scales, places = (x.at[rows] for x in inputs.scales or ()), (stored.k_scales, stored.v_scales)
        _copy(scales, (place.at[_scales_at(at, launch)] for place in places), full, collective=False)

    _when_stored(inputs, page, from_pool, lambda: _arrive(full, 2 * _COPIES))


def _pool_rows(inputs: Inputs, piece: Piece, page: Scalar, place: Scalar, launch: Launch) -> pl.Slice:
    """Where a tile of a page lies in the pool."""
    shape = launch.shape
    page_of_layer = inputs.layer[0] * shape.pages + page
    return pl.ds((page_of_layer * shape.kv_heads + piece.head) * shape.page_rows + place * TILE, TILE)


def _load_fresh(
    inputs: Inputs, piece: Piece, page: Scalar, place: Scalar, at: _At, ring: Ring, launch: Launch
) -> None:
    """Fetch a tile of fresh rows."""
    wait_for_kernel_before(launch.chained)
    rows = pl.ds(launch.first_copied(page) + place * TILE, TILE)
    columns = pl.ds(piece.head * launch.shape.head_dim, launch.shape.head_dim)
    sources = (x.at[rows, columns] for x in inputs.fresh or ())
    # A ring whose stages blocks fill by themselves is not shared.
    _copy(sources, (ring.k.at[at], ring.v.at[at]), ring.full.at[at[0]], collective=ring.stored is None)


def _copy(sources: Iterable[Any], to: Iterable[Any], full: Any, *, collective: bool = True) -> None:
    """Fetch what belongs to keys and to values.

    Arguments:
    - `full`: the barrier of their stage.
    - `collective`: each block of the cluster loads a part for all of them; else all for itself.
    """
    for source, place in zip(sources, to, strict=True):
        axes = "row_block" if collective else None
        plgpu.copy_gmem_to_smem(source, place, full, collective_axes=axes)


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
