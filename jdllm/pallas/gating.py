"""The gate of a feed-forward layer, on tiles in registers."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_STRIP = 16  # columns at a time

Tile = Float[Array, "rows columns"]


def gated(gate: Tile, up: Tile) -> Tile:
    """silu(gate) * up in the dtype of both, rounded as often as in two operations."""
    # Few columns at a time: everything in f32 at once would not fit into registers.
    strips = [slice(at, at + _STRIP) for at in range(0, gate.shape[1], _STRIP)]
    return jnp.concatenate([_strip(gate[:, columns], up[:, columns]) for columns in strips], axis=1)


def _strip(gate: Tile, up: Tile) -> Tile:
    dtype = gate.dtype
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    # 1 / (1 + exp(-gate)) without a division, which would take ten times as many instructions.
    root = lax.rsqrt(1 + jnp.exp2(gate * -math.log2(math.e)))
    silu = (gate * (root * root)).astype(dtype).astype(jnp.float32)
    return (silu * up).astype(dtype)
