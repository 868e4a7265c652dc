"""Stores of some rows of a tile, inside kernels of Pallas for Mosaic GPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jdllm.pallas.hopper import WARPGROUP_ROWS

Scalar = Int[Array, ""]


def send_rows(tile: Any, out: Any, row: Scalar, columns: pl.Slice, begin: Scalar, end: Scalar) -> None:
    """Copy rows `[begin, end)` of a tile to memory (TMA); the caller commits the copies.

    Arguments:
    - `tile`: 64 rows in shared memory, swizzled with a strip of 1.
    - `out`: where the tile's first row is `row`.
    - `columns`: those of the tile.
    """

    def send(first: Scalar | int, count: int) -> None:
        to = out.at[pl.ds(row + first, count), columns]
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(first, count)], to, commit_group=False)

    whole = end - begin == WARPGROUP_ROWS
    pl.when(whole)(lambda: send(0, WARPGROUP_ROWS))
    pl.when(jnp.logical_not(whole))(lambda: _send_some(send, begin, end))


def _send_some(send: Callable[[Scalar, int], None], begin: Scalar, end: Scalar) -> None:
    """Call `send(first, count)` for runs that make up `[begin, end)`: a copy's size is static."""
    size = WARPGROUP_ROWS // 2
    while size:
        some = (end - begin) & size
        pl.when(some != 0)(functools.partial(send, begin, size))
        begin += some
        size //= 2
