"""Products of a few rows by XLA, on any device."""

from collections.abc import Sequence

import jax
from jax import lax

from jdllm.models.layers import linear
from jdllm.models.rotary import rotate
from jdllm.pallas.skinny_matmul.types import Layer, Product, Rotation, Stack, X


def skinny_matmul_xla(
    x: X,
    weights: Sequence[Stack],
    *,
    layer: Layer,
    gated: bool = False,
    rotation: Rotation | None = None,
) -> tuple[Product, ...]:
    """Portable form of `jdllm.pallas.skinny_matmul.skinny_matmul`."""
    own = (lax.dynamic_index_in_dim(w, layer, keepdims=False) for w in weights)
    products = tuple(linear(x, w) for w in own)
    if rotation is not None:
        head_dim = 2 * rotation[0].shape[1]
        turned = (rotate(y.reshape(len(y), -1, head_dim), *rotation).reshape(y.shape) for y in products[:-1])
        products = *turned, products[-1]
    if not gated:
        return products
    gate, up = products
    return (jax.nn.silu(gate) * up,)
