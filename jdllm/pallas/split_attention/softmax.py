"""The online softmax of Split-S attention, in the registers of a warpgroup."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.pallas.split_attention.tiles import TILE
from jdllm.pallas.split_attention.work import Scalar

LOWEST = -1e30
"""The maximum of no scores: finite, so that differences are numbers."""

PerRow = Float[Array, " warpgroup_rows"]
Scores = Float[Array, "warpgroup_rows keys"]


class State(NamedTuple):
    """An online softmax; `m` is the largest score, not scaled yet."""

    o: Float[Array, "warpgroup_rows head_dim"]
    m: PerRow
    l: PerRow  # noqa: E741


class LiveRows(NamedTuple):
    """Which keys of each tile of a step are live.

    - `counts`: how many.
    - `before`: how many rows of the tile lie before them; `None` where none do anywhere.
    """

    counts: list[Scalar]
    before: list[Scalar] | None


def no_state(head_dim: int) -> State:
    """That of no keys."""

    def splat(shape: tuple[int, ...], value: float, layout: Any) -> Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    per_row = functools.partial(splat, (WARPGROUP_ROWS,), layout=plgpu.Layout.WGMMA.reduce(1))
    return State(splat((WARPGROUP_ROWS, head_dim), 0.0, plgpu.Layout.WGMMA), per_row(LOWEST), per_row(0.0))


def masked(scores: Scores, live: LiveRows) -> Scores:
    """The scores, those of rows that are not live as far below all others as can be."""
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)

    def seen_from(tile: int) -> Bool[Array, "warpgroup_rows keys"]:
        """What is seen of a tile, for columns from its first one on."""
        begin, count = tile * TILE, live.counts[tile]
        if live.before is None:
            return column < count + begin
        begin += live.before[tile]
        return (column >= begin) & (column < count + begin)

    seen = seen_from(0)
    for tile in range(1, len(live.counts)):
        seen = lax.select(column < tile * TILE, seen, seen_from(tile))
    return jnp.where(seen, scores, -jnp.inf)


def across(values: PerRow, columns: int) -> Array:
    """A number of each row in all its columns."""
    return lax.broadcast_in_dim(values, (WARPGROUP_ROWS, columns), [0])
