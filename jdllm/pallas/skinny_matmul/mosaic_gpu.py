"""Products of a few rows on Hopper: one kernel streams the weights, XLA adds the sums of their parts."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp

from jdllm.pallas.hopper import padded_rows
from jdllm.pallas.skinny_matmul.kernel import block_products
from jdllm.pallas.skinny_matmul.limits import check_mosaic_gpu
from jdllm.pallas.skinny_matmul.tiles import Tiles, default_tiles
from jdllm.pallas.skinny_matmul.types import Layer, Product, Stack, X


def skinny_matmul_mosaic_gpu(
    x: X, weights: Sequence[Stack], *, layer: Layer, gated: bool = False, tiles: Tiles | None = None
) -> tuple[Product, ...]:
    """Hopper form of `jdllm.pallas.skinny_matmul.skinny_matmul`, for bfloat16 and float16.

    Every sum adds its terms in an order that depends on the cut alone: a row's bits depend on the row and
    the number of rows, not on what the others hold. A gated product differs from two products in the last
    bit of the silu.

    Arguments:
    - `tiles`: the cut; by default one that suits the shapes.

    Raises `NotImplementedError`, naming the limit, for operands and cuts that it cannot take.
    """
    check_mosaic_gpu(x, weights)
    rows, (_, n, k) = x.shape[0], weights[0].shape
    padded = padded_rows(rows)
    tiles = tiles or default_tiles(padded, n, k, len(weights), gated)
    tiles.check(k, len(weights), gated)
    if padded > rows:
        x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    products = block_products(x, weights, jnp.asarray(layer, jnp.int32), tiles, gated)
    return tuple(functools.reduce(jnp.add, parts[:, :rows]).astype(x.dtype) for parts in products)
