"""The executables of `jdllm.execution.offload.forward`: parts of one layer for one chunk of rows.

`weights` belong to the layer, unstacked, `h` the chunk's rows of the residual stream.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jdllm.execution.arriving import arrived
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Group, Heads, KeysValues, Layer, Ranges, Weights
from jdllm.models.moe import Experts
from jdllm.models.rotary import rotation_at
from jdllm.pallas.attention import AttentionOutput, attention, merge, nothing_seen

Scalar = Int[Array, ""] | int


def take_layer(stack: Weights, place: Scalar) -> Weights:
    """A copy of the weights of one layer of a stack, which may be in host memory."""
    return {name: leaf[0] for name, leaf in arrived(stack, place).items()}


def keys_values(
    weights: Weights, h: Hidden, positions: RowInts, group: Scalar, *, config: ModelConfig, groups: int
) -> KeysValues:
    """Rotated keys and values of one of `groups` equal groups of heads."""
    rotation = rotation_at(config.rope, config.head_dim, positions)
    k, v = Layer(weights, config).project(h, rotation, ("k", "v"), Group(group, groups))
    return k, v


def store_keys_values(
    stored: KeysValues,
    weights: Weights,
    h: Hidden,
    positions: RowInts,
    start: Scalar,
    group: Scalar,
    *,
    config: ModelConfig,
    groups: int,
) -> tuple[KeysValues, Array]:
    """Write `keys_values` of the chunk that begins at row `start` into the keys and values of all rows, to be
    donated.

    Returns them, and an array to wait for that is not donated.
    """
    parts = keys_values(weights, h, positions, group, config=config, groups=groups)
    k, v = (lax.dynamic_update_slice_in_dim(x, part, start, 0) for x, part in zip(stored, parts, strict=True))
    return (k, v), v[0, 0, 0]


def attend(
    weights: Weights,
    h: Hidden,
    rows: Rows,
    stored: KeysValues,
    group: Scalar,
    *,
    config: ModelConfig,
    groups: int,
) -> Heads:
    """Attention of one of `groups` groups of query heads over the keys and values of all rows."""
    rotation = rotation_at(config.rope, config.head_dim, rows.positions)
    sees = Ranges(rows, rotation, attention, stored)
    return sees.attend(Layer(weights, config), h, Group(group, groups))[0]


def start_queries(
    weights: Weights, h: Hidden, positions: RowInts, *, config: ModelConfig
) -> tuple[Heads, AttentionOutput]:
    """Rotated queries of all heads, and their attention over no keys yet, with f32 outputs."""
    rotation = rotation_at(config.rope, config.head_dim, positions)
    (q,) = Layer(weights, config).project(h, rotation, ("q",))
    return q, nothing_seen(q)


def accumulate(
    attended: AttentionOutput,
    q: Heads,
    rows: Rows,
    part: KeysValues,
    start: Scalar,
    *,
    config: ModelConfig,
) -> tuple[AttentionOutput, Array]:
    """Merge the attention over a chunk of keys and values that begins at row `start` into `attended`, which
    is to be donated.

    Returns it, and an array to wait for that is not donated.
    """
    keys = part[0].shape[0]
    first, last = (jnp.clip(bound - start, 0, keys) for bound in (rows.k_start, rows.k_end))
    seen = first < last
    first, last = jnp.where(seen, first, 0), jnp.where(seen, last, 0)
    parts = attention(q, *part, first, last, scale=config.attention_scale)
    merged = merge([attended, AttentionOutput(*parts)])
    return merged, merged.l[0, 0]


def finish(weights: Weights, h: Hidden, outputs: list[Heads], *, config: ModelConfig) -> Hidden:
    """The rows after the layer, from the rows before it and the attention outputs of all groups of heads."""
    if "experts_gate" in weights:
        gate, up, down = (weights[f"experts_{name}"] for name in ("gate", "up", "down"))
        weights = {**weights, "experts": Experts(gate, up, down, 0, gate.shape[0])}
    return Layer(weights, config).finish(h, jnp.concatenate(outputs, axis=1))
