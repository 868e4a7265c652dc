"""Products of a few rows on Hopper: one kernel streams the weights, XLA adds the sums of their parts."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.pallas.device import target
from jdllm.pallas.hopper import padded_rows
from jdllm.pallas.products import Interpreted, TensorCores
from jdllm.pallas.skinny_matmul.kernel import block_products
from jdllm.pallas.skinny_matmul.limits import check_mosaic_gpu
from jdllm.pallas.skinny_matmul.tiles import WIDE, Tiles, default_tiles
from jdllm.pallas.skinny_matmul.types import (
    Bias,
    Layer,
    Product,
    Rotation,
    Weight,
    X,
    head_dim_of,
    kind_of,
    unpacked,
)
from jdllm.quantised import Shifted


def skinny_matmul_mosaic_gpu(
    x: X,
    weights: Sequence[Weight],
    *,
    layer: Layer,
    gated: bool = False,
    bias: Bias | None = None,
    rotation: Rotation | None = None,
    chained: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Product, ...]:
    """Hopper form of `jdllm.pallas.skinny_matmul.skinny_matmul`, for bfloat16 and float16.

    Every sum adds its terms in an order that depends on the cut alone: a row's bits depend on the row and
    the number of rows, not on what the others hold. A gated product differs from two products in the last
    bit of the silu.

    Arguments:
    - `chained`: part of a chain of kernels, where all but `x` is older.
    - `tiles`: the cut; by default one that suits the shapes.

    Raises `NotImplementedError`, naming the limit, for operands and cuts that it cannot take.
    """
    products = _parts(x, weights, layer, tiles, gated=gated, bias=bias, rotation=rotation, chained=chained)
    return tuple(functools.reduce(jnp.add, parts).astype(x.dtype) for parts in products)


def skinny_parts_mosaic_gpu(
    x: X, weight: Weight, *, layer: Layer, chained: bool = False, tiles: Tiles | None = None
) -> Float[Array, "parts rows n"]:
    """Hopper form of `jdllm.pallas.skinny_matmul.skinny_parts`; `tiles` is the cut, by default what suits."""
    (parts,) = _parts(x, [weight], layer, tiles, chained=chained)
    return parts


def _parts(
    x: X,
    weights: Sequence[Weight],
    layer: Layer,
    tiles: Tiles | None,
    *,
    gated: bool = False,
    bias: Bias | None = None,
    rotation: Rotation | None = None,
    chained: bool,
) -> list[Float[Array, "parts rows n"]]:
    head_dim = head_dim_of(rotation)
    check_mosaic_gpu(x, weights, head_dim)
    rows, k, padded = *x.shape, padded_rows(x.shape[0])
    outputs = [w.shape[1] for w in weights]
    options = {"gated": gated, "biased": bias is not None, "head_dim": head_dim}
    values, scales = unpacked(weights)
    kind = kind_of(weights)
    bits, shifted = kind.bits if kind else WIDE, kind is not None and issubclass(kind, Shifted)
    tiles = tiles or default_tiles(padded, outputs, k, bits=bits, shifted=shifted, **options)
    tiles.check(padded, outputs, k, **options)
    if padded > rows:
        x, *angles = (jnp.pad(y, ((0, padded - rows), (0, 0))) for y in (x, *(rotation or ())))
        rotation = (angles[0], angles[1]) if angles else None
    options = {"gated": gated, "bias": bias, "rotation": rotation, "chained": chained}
    arithmetic = TensorCores if target().on_cuda else Interpreted
    layer = jnp.asarray(layer, jnp.int32)
    products = block_products(x, values, scales, layer, tiles, arithmetic, **options)
    return [parts[:, :rows] for parts in products]
