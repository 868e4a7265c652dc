"""Products of a few rows by XLA, on any device."""

from collections.abc import Sequence

import jax
from jax import lax

from jdllm.models.layers import linear
from jdllm.pallas.skinny_matmul.types import Layer, Product, Stack, X


def skinny_matmul_xla(
    x: X, weights: Sequence[Stack], *, layer: Layer, gated: bool = False
) -> tuple[Product, ...]:
    """Portable form of `jdllm.pallas.skinny_matmul.skinny_matmul`."""
    own = (lax.dynamic_index_in_dim(w, layer, keepdims=False) for w in weights)
    products = tuple(linear(x, w) for w in own)
    if not gated:
        return products
    gate, up = products
    return (jax.nn.silu(gate) * up,)
