"""What the roles of the Hopper kernel of Split-S attention share: operands, memory, and who does what."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float, Int

from jdllm.pallas.products import Products
from jdllm.pallas.split_attention.softmax import LiveRows
from jdllm.pallas.split_attention.tiles import TILE, Tiles
from jdllm.pallas.split_attention.types import FRESH_UNIT
from jdllm.pallas.split_attention.work import Piece, Scalar, Shape, pair_of, piece_of, share_of


class Inputs(NamedTuple):
    """What the kernel reads; inside it, references.

    - `q`: rows are request x query, columns head x head dimension; of single queries rows are request x head.
    - `k`, `v`: the pools, rows are layer x page x head x row of the page.
    - `scales`: of the rows of `k` and `v`, where these have 8 bits.
    - `fresh`: keys and values that the table has besides, if any; columns are head x head dimension.
    """

    q: Float[Array, "queries columns"]
    k: Float[Array, "pool_rows head_dim"]
    v: Float[Array, "pool_rows head_dim"]
    pages: Int[Array, " entries"]
    valid: Int[Array, " entries"]
    first: Int[Array, " requests+1"]
    layer: Int[Array, " 1"]
    scales: tuple[BFloat16[Array, " pool_rows"], BFloat16[Array, " pool_rows"]] | None
    fresh: tuple[Float[Array, "fresh_rows columns"], Float[Array, "fresh_rows columns"]] | None


class Stored(NamedTuple):
    """Keys and values in 8 bits in shared memory, and barriers that say when they are there and when their
    place is free. The place of fresh rows, which have 16 bits, stays empty.

    - `k_scales`, `v_scales`: of all stages, one after the other.
    """

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    full: Any
    free: Any


class Ring(NamedTuple):
    """Operands in shared memory, and barriers that say when they are there and when their place is free.

    - `turn`: where two warpgroups take turns at the tensor cores, each waits for the other one here.
    - `stored`: where keys and values are stored in 8 bits: what is loaded, to be widened for this ring.
    """

    q: Any
    k: Any
    v: Any
    q_full: Any
    q_free: Any
    full: Any
    free: Any
    turn: Any
    stored: Stored | None = None


@dataclasses.dataclass(frozen=True)
class Launch:
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

    @property
    def in_8_bits(self) -> bool:
        """Whether the pool stores keys and values so."""
        return self.tiles.stored_stages > 0

    def stage(self, step: Scalar) -> Scalar:
        return lax.rem(step, jnp.int32(self.tiles.stages))

    def stored_stage(self, step: Scalar) -> Scalar:
        return lax.rem(step, jnp.int32(self.tiles.stored_stages))

    def when_live(
        self, piece: Piece, inputs: Inputs, fill: Callable[[Scalar, Scalar], None]
    ) -> Callable[[Scalar, Scalar], Scalar]:
        """A function of a step of the piece and of the number of live steps before, which returns this number
        for the next step. It calls `fill` with both where any key of the step is live."""

        def step(k: Scalar, count: Scalar) -> Scalar:
            live = functools.reduce(jnp.add, self.live_rows(piece, k, inputs).counts) > 0
            pl.when(live)(lambda: fill(k, count))
            return count + live.astype(jnp.int32)

        return step

    def loaded_tiles(self, piece: Piece, step: Scalar) -> list[Scalar]:
        """The tiles of a step. One beyond the piece is masked, but its values must be numbers: that is the
        last one, once more."""
        first = piece.begin + step * self.tiles.step_tiles
        return [jnp.minimum(first + i, piece.end - 1) for i in range(self.tiles.step_tiles)]

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
