"""Grouped products with matrices in few bits on Hopper: units of rows are found by XLA, one kernel multiplies
them."""

import jax.numpy as jnp

from jdllm.pallas.device import target
from jdllm.pallas.grouped_matmul.few_bits_kernel import few_bits_products
from jdllm.pallas.grouped_matmul.limits import check_few_bits_mosaic_gpu
from jdllm.pallas.grouped_matmul.row_units import row_units
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Product, X, sides
from jdllm.pallas.hopper import STRIP
from jdllm.pallas.products import Interpreted, TensorCores
from jdllm.pallas.quantised_matmul.tiles import Tiles, default_tiles
from jdllm.quantised import Quantised


def grouped_matmul_few_bits_mosaic_gpu(
    x: X,
    weights: Quantised,
    group_sizes: GroupSizes,
    first_group: FirstGroup,
    gate: Quantised | None = None,
    *,
    tiles: Tiles | None = None,
) -> Product:
    """Hopper form of `jdllm.pallas.grouped_matmul.grouped_matmul` for matrices in few bits, and for rows of
    bfloat16 and float16.

    A gated product reads `x` once and writes neither of its two products, which are rounded as those of
    `grouped_matmul_mosaic_gpu`. Weights of 4 bits are scaled, and rounded to the dtype of `x`, before they
    are multiplied. A scale is the sum of two numbers of this dtype. Sums of weights of 8 bits are scaled. No
    row is rounded to floats of 8 bits.

    Every sum adds its terms in the order of the inputs, whatever the other rows and the cut are: a row's bits
    depend on the row and its matrix only.

    Arguments:
    - `tiles`: the cut; by default one that suits the shapes.

    Raises `NotImplementedError` where `check_few_bits_mosaic_gpu` does, and for tiles that do not divide the
    matrices.
    """
    check_few_bits_mosaic_gpu(x, weights, gate)
    matrices = (weights,) if gate is None else (gate, weights)
    (rows, (k, n)), groups = (x.shape[0], sides(weights)), group_sizes.shape[0]
    if rows == 0 or groups == 0:
        return jnp.zeros((rows, n), x.dtype)
    tiles = tiles or default_tiles(rows, n, k, weights.bits, groups=groups, matrices=len(matrices))
    if tiles.matrices != len(matrices) or n % (tiles.cluster * tiles.columns):
        raise NotImplementedError(
            f"tiles of {tiles.cluster * tiles.columns} columns of {tiles.matrices} matrices do not divide {n}"
            f" columns of {len(matrices)}"
        )
    units = row_units(group_sizes, first_group, rows, tiles.rows)
    padded = jnp.pad(x, ((0, -rows % STRIP), (0, 0)))
    arithmetic = TensorCores if target().on_cuda else Interpreted
    return few_bits_products(padded, matrices, units, rows, tiles, arithmetic)
