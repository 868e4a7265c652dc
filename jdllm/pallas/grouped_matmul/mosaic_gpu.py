"""Grouped products on Hopper: units of rows are found by XLA, one kernel multiplies them."""

import jax.numpy as jnp

from jdllm.pallas.grouped_matmul.kernel import unit_products
from jdllm.pallas.grouped_matmul.limits import check_mosaic_gpu
from jdllm.pallas.grouped_matmul.row_units import row_units
from jdllm.pallas.grouped_matmul.tiles import Tiles, default_tiles
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Plain, Product, X
from jdllm.pallas.hopper import STRIP


def grouped_matmul_mosaic_gpu(
    x: X,
    weights: Plain,
    group_sizes: GroupSizes,
    first_group: FirstGroup,
    gate: Plain | None = None,
    *,
    tiles: Tiles | None = None,
) -> Product:
    """Hopper form of `jdllm.pallas.grouped_matmul.grouped_matmul`, for bfloat16 and float16.

    A gated product reads `x` once and writes neither of its two products. Both are rounded to the dtype of
    `x`, so is the silu of the first, and so is the result: what differs from two products is the last bit
    of the silu.

    Every sum adds its terms in steps of 64 in the same order, whatever the other rows and the cut are: a
    row's bits depend on the row and its matrix only.

    Arguments:
    - `tiles`: the cut; by default one chosen by the width of the matrices.

    Raises `NotImplementedError` where `check_mosaic_gpu` does, and for tiles that do not divide the matrices.
    """
    check_mosaic_gpu(x, weights, gate)
    matrices = (weights,) if gate is None else (gate, weights)
    rows, n = x.shape[0], weights.shape[2]
    tiles = tiles or default_tiles(n, len(matrices))
    if tiles.matrices != len(matrices) or n % tiles.unit_columns:
        raise NotImplementedError(
            f"tiles of {tiles.unit_columns} columns of {tiles.matrices} matrices do not divide "
            f"{n} columns of {len(matrices)}"
        )
    if rows == 0 or group_sizes.shape[0] == 0:
        return jnp.zeros((rows, n), x.dtype)
    units = row_units(group_sizes, first_group, rows, tiles.unit_rows)
    padded = jnp.pad(x, ((0, -rows % STRIP), (0, 0)))
    return unit_products(padded, matrices, units, rows, tiles)
