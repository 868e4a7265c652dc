"""Products of a few rows by XLA, on any device."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jdllm.layers import linear, rotate
from jdllm.pallas.skinny_matmul.types import Bias, Layer, Product, Rotation, Weight, X


def skinny_matmul_xla(
    x: X,
    weights: Sequence[Weight],
    *,
    layer: Layer,
    gated: bool = False,
    bias: Bias | None = None,
    rotation: Rotation | None = None,
) -> tuple[Product, ...]:
    """Portable form of `jdllm.pallas.skinny_matmul.skinny_matmul`."""
    own = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, layer, keepdims=False), list(weights))
    products = tuple(linear(x, w) for w in own)
    if bias is not None:
        added = lax.dynamic_index_in_dim(bias, layer, keepdims=False)
        ends = itertools.accumulate(w.shape[1] for w in weights[:-1])
        products = tuple(y + b for y, b in zip(products, jnp.split(added, list(ends)), strict=True))
    if rotation is not None:
        products = rotated(products, rotation)
    if not gated:
        return products
    gate, up = products
    return (jax.nn.silu(gate) * up,)


def rotated(products: Sequence[Product], rotation: Rotation) -> tuple[Product, ...]:
    """All products but the last rotated, head by head."""
    head_dim = 2 * rotation[0].shape[1]
    turned = (rotate(y.reshape(len(y), -1, head_dim), *rotation).reshape(y.shape) for y in products[:-1])
    return *turned, products[-1]
