"""The Hopper kernel of Split-S attention, in Pallas for Mosaic GPU.

One warpgroup of a block loads keys and values by TMA into a ring of stages; the others multiply (wgmma) and
keep an online softmax in registers. The heads of a group are folded into the rows of one tile, so that keys
are read once. Blocks are persistent: a worker walks over an equal part of all keys (`work`) and leaves the
unnormalised output, the maximum and the sum of each piece, which `merge` puts together.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jdllm.pallas.chain import let_next_start, wait_for_kernel_before
from jdllm.pallas.hopper import STRIP, WARPGROUP_ROWS
from jdllm.pallas.products import Products
from jdllm.pallas.ring import COMPILER_PARAMS, drain, free_barriers, in_roles, release, swizzled
from jdllm.pallas.shared_lowering import lowered_once
from jdllm.pallas.split_attention.softmax import LiveRows, State, across, masked, no_state
from jdllm.pallas.split_attention.tiles import LOADER_REGISTERS, TILE, Tiles
from jdllm.pallas.split_attention.types import FRESH_UNIT
from jdllm.pallas.split_attention.work import Partials, Piece, Scalar, Shape, pair_of, piece_of, share_of


class Inputs(NamedTuple):
    """What the kernel reads; inside it, references.

    - `q`: rows are request x query, columns head x head dimension; of single queries rows are request x head.
    - `k`, `v`: the pools, rows are layer x page x head x row of the page.
    - `fresh_k`, `fresh_v`: what the table has besides, if anything; columns are head x head dimension.
    """

    q: Float[Array, "queries columns"]
    k: Float[Array, "pool_rows head_dim"]
    v: Float[Array, "pool_rows head_dim"]
    pages: Int[Array, " entries"]
    valid: Int[Array, " entries"]
    first: Int[Array, " requests+1"]
    layer: Int[Array, " 1"]
    fresh_k: Float[Array, "fresh_rows columns"] | None = None
    fresh_v: Float[Array, "fresh_rows columns"] | None = None


class _Ring(NamedTuple):
    """Operands in shared memory, and barriers that say when they are there and when their place is free.

    - `turn`: where two warpgroups take turns at the tensor cores, each waits for the other one here.
    """

    q: Any
    k: Any
    v: Any
    q_full: Any
    q_free: Any
    full: Any
    free: Any
    turn: Any


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What every warpgroup knows before it starts."""

    tiles: Tiles
    shape: Shape
    scale: float
    products: Products
    fresh_unit: int
    chained: bool

    @property
    def query_copies(self) -> int:
        """How many copies fetch the queries of a block."""
        return 1 if self.shape.single else self.tiles.block_rows // self.run

    @property
    def run(self) -> int:
        """Folded rows that are queries of one head and lie in one block, from each multiple of it on."""
        return math.gcd(self.shape.queries, self.tiles.block_rows)

    @property
    def alternates(self) -> bool:
        """Whether two warpgroups take turns at the tensor cores."""
        return self.tiles.row_groups == 2

    def stage(self, step: Scalar) -> Scalar:
        return lax.rem(step, jnp.int32(self.tiles.stages))

    def for_each_piece(
        self, first: Any, visit: Callable[[Piece, Scalar, Scalar], Scalar]
    ) -> tuple[Scalar, Scalar]:
        """Call `visit(piece, pieces before, steps before)`, which returns the steps so far, for each piece.

        Returns the number of pieces and that of all their steps.
        """
        share, worker = share_of(first, self.shape, self.tiles), lax.axis_index("worker")
        begin, end = share.begin(worker), share.begin(worker + 1)
        first_pair = pair_of(begin, share, first, self.shape)
        last_pair = pair_of(jnp.maximum(end - 1, begin), share, first, self.shape)

        def body(pair: Scalar, carry: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            pieces, steps = carry
            piece = piece_of(pair, begin, end, share, first, self.shape)
            any_tile = piece.begin < piece.end
            steps = lax.cond(any_tile, lambda: visit(piece, pieces, steps), lambda: steps)
            return pieces + any_tile.astype(jnp.int32), steps

        pairs = jnp.where(begin < end, last_pair + 1, first_pair)
        return lax.fori_loop(first_pair, pairs, body, (jnp.int32(0), jnp.int32(0)))

    def live_rows(self, piece: Piece, step: Scalar, inputs: Inputs) -> LiveRows:
        """The live rows of the tiles of a step."""
        counts, before = [], []
        for tile in (piece.begin + step * self.tiles.step_tiles + i for i in range(self.tiles.step_tiles)):
            entry, place = self.place(jnp.minimum(tile, piece.end - 1))
            rows = jnp.clip(inputs.valid[entry] - place * TILE, 0, TILE)
            counts.append(jnp.where(tile < piece.end, rows, 0))
            if self.fresh_unaligned:
                page = inputs.pages[entry]
                before.append(jnp.where(page < 0, lax.rem(~page * self.fresh_unit, jnp.int32(FRESH_UNIT)), 0))
        return LiveRows(counts, before or None)

    @property
    def fresh_unaligned(self) -> bool:
        """Whether fresh rows may begin where no copy can."""
        return self.fresh_unit < FRESH_UNIT

    def first_copied(self, page: Scalar) -> Scalar:
        """The fresh row with which the tiles of an entry begin."""
        if self.fresh_unaligned:
            page = ~lax.div(~page * self.fresh_unit, jnp.int32(FRESH_UNIT))
        return ~page * FRESH_UNIT

    def place(self, tile: Scalar) -> tuple[Scalar, Scalar]:
        """The entry that a tile of a head belongs to, and which of its tiles it is."""
        page_tiles = jnp.int32(self.shape.page_tiles)
        return lax.div(tile, page_tiles), lax.rem(tile, page_tiles)

    def steps(self, piece: Piece) -> Scalar:
        return lax.div(
            piece.end - piece.begin + (self.tiles.step_tiles - 1), jnp.int32(self.tiles.step_tiles)
        )


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
    - `inputs`: bfloat16 or float16 operands.
    - `shape`: with at most `tiles.rows` rows of queries that are loaded for a pair.
    - `tiles`: the cut.
    - `scale`: factor of the scores.
    - `products`: how tiles are multiplied.
    - `fresh_unit`: fresh rows of an entry begin at a multiple of it.
    - `chained`: part of a chain of kernels, where all but queries and fresh rows is older.
    """
    launch = _Launch(tiles, shape, scale, products, fresh_unit, chained)
    pieces = shape.pieces(tiles)
    per_row = jax.ShapeDtypeStruct((pieces, tiles.rows), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, launch=launch),
        out_type=[jax.ShapeDtypeStruct((*per_row.shape, shape.head_dim), jnp.float32), per_row, per_row],
        scratch_types=_ring(launch, inputs.q.dtype),
        grid=(tiles.workers,),
        grid_names=("worker",),
        cluster=(tiles.row_blocks,),
        cluster_names=("row_block",),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="split_attention",
    )
    return Partials(*kernel(*(x for x in inputs if x is not None)))


def _ring(launch: _Launch, dtype: jnp.dtype) -> list[Any]:
    tiles, head_dim = launch.tiles, launch.shape.head_dim
    keys = (tiles.stages, tiles.step_keys, head_dim)
    return list(
        _Ring(
            q=swizzled((tiles.block_rows, head_dim), dtype),
            k=swizzled(keys, dtype),
            v=swizzled(keys, dtype),
            q_full=plgpu.Barrier(num_arrivals=launch.query_copies),
            q_free=plgpu.Barrier(num_arrivals=tiles.consumers),
            full=plgpu.Barrier(num_arrivals=2 * tiles.step_tiles, num_barriers=tiles.stages),
            free=free_barriers(tiles.stages, tiles.row_groups, (tiles.row_blocks,), ("row_block",)),
            turn=plgpu.Barrier(num_arrivals=2),
        )
    )


def _kernel(*refs, launch: _Launch) -> None:
    given = len(refs) - len(Partials._fields) - len(_Ring._fields)
    inputs, refs = Inputs(*refs[:given]), refs[given:]
    out, ring = Partials(*refs[: len(Partials._fields)]), _Ring(*refs[len(Partials._fields) :])
    tiles = launch.tiles
    let_next_start(launch.chained)
    in_roles(
        tiles.consumers,
        # A single one has enough; asking would take all that the processor has.
        (LOADER_REGISTERS, tiles.consumer_registers) if tiles.consumers > 1 else None,
        lambda: _load(inputs, ring, launch),
        lambda: _consume(inputs, ring, out, launch),
    )


def _load(inputs: Inputs, ring: _Ring, launch: _Launch) -> None:
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
    inputs: Inputs, piece: Piece, tile: Scalar, at: tuple[Scalar, pl.Slice], ring: _Ring, launch: _Launch
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


def _load_queries(q: Any, piece: Piece, ring: _Ring, launch: _Launch) -> None:
    """Fetch this block's part of the queries of the piece's heads."""
    wait_for_kernel_before(launch.chained)
    if launch.shape.single:
        _load_heads(q, piece, ring, launch)
    else:
        _fold_heads(q, piece, ring, launch)


def _load_heads(q: Any, piece: Piece, ring: _Ring, launch: _Launch) -> None:
    """Fetch the heads of a single query; rows beyond, whose results nobody reads, may hold anything."""
    tiles, shape = launch.tiles, launch.shape
    rows = min(shape.tile_rows, tiles.block_rows)
    first = lax.div(shape.first_head(piece.request, piece.head), jnp.int32(STRIP)) * STRIP
    source = q.at[pl.ds(first + lax.axis_index("row_block") * tiles.block_rows, rows)]
    plgpu.copy_gmem_to_smem(source, ring.q.at[pl.ds(0, rows)], ring.q_full)


def _fold_heads(q: Any, piece: Piece, ring: _Ring, launch: _Launch) -> None:
    """Fold the queries of the piece's heads into the rows of this block; rows beyond repeat the last ones."""
    tiles, shape, run = launch.tiles, launch.shape, launch.run
    for begin in range(0, tiles.block_rows, run):
        row = jnp.minimum(lax.axis_index("row_block") * tiles.block_rows + begin, shape.rows - run)
        head = piece.head * shape.group + lax.div(row, jnp.int32(shape.queries))
        query = piece.request * shape.queries + lax.rem(row, jnp.int32(shape.queries))
        source = q.at[pl.ds(query, run), pl.ds(head * shape.head_dim, shape.head_dim)]
        plgpu.copy_gmem_to_smem(source, ring.q.at[pl.ds(begin, run)], ring.q_full)


def _consume(inputs: Inputs, ring: _Ring, out: Partials, launch: _Launch) -> None:
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
    ring: _Ring,
    stage: Scalar,
    take_turn: Callable[[], None],
    launch: _Launch,
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
