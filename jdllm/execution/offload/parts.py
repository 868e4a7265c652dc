"""The executables of `jdllm.execution.offload.forward`: parts of one layer for one chunk of rows.

`layer` holds the unstacked weights of the layer, `h` the chunk's rows of the residual stream.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.layers import linear, rms_norm, rotate
from jdllm.models.block import AttentionFn, Hidden, Layer, RowInts, Rows, ffn_branch, project_heads
from jdllm.models.config import ModelConfig
from jdllm.models.moe import Experts, GroupedMatmulFn
from jdllm.models.rotary import cos_sin
from jdllm.pallas.attention import AttentionOutput, merge, nothing_seen

Heads = Float[Array, "rows heads head_dim"]
KeysValues = tuple[Heads, Heads]
Scalar = Int[Array, ""] | int


def take_layer(stack: Layer, place: Scalar) -> Layer:
    """A copy of the weights of one layer of a stack."""
    return {name: lax.dynamic_index_in_dim(leaf, place, keepdims=False) for name, leaf in stack.items()}


def keys_values(
    layer: Layer, h: Hidden, positions: RowInts, group: Scalar, *, config: ModelConfig, heads: int
) -> KeysValues:
    """Rotated keys and values of the `group`-th `heads` key-value heads."""
    x = rms_norm(h, layer["attn_norm"], config.rms_norm_eps)
    k, v = (project_heads(layer, config, name, x, (group * heads, heads)) for name in ("k", "v"))
    return rotate(k, *cos_sin(config.rope, config.head_dim, positions)), v


def store_keys_values(
    stored: KeysValues,
    layer: Layer,
    h: Hidden,
    positions: RowInts,
    start: Scalar,
    group: Scalar,
    *,
    config: ModelConfig,
    heads: int,
) -> tuple[KeysValues, Array]:
    """Write `keys_values` of the chunk that begins at row `start` into those of all rows, to be donated.

    Returns them, and an array to wait for that is not donated.
    """
    parts = keys_values(layer, h, positions, group, config=config, heads=heads)
    k, v = (lax.dynamic_update_slice_in_dim(x, part, start, 0) for x, part in zip(stored, parts, strict=True))
    return (k, v), v[0, 0, 0]


def attend(
    layer: Layer,
    h: Hidden,
    rows: Rows,
    stored: KeysValues,
    group: Scalar,
    *,
    config: ModelConfig,
    heads: int,
    attention: AttentionFn,
) -> Heads:
    """Attention of the `group`-th `heads` query heads over the keys and values of all rows."""
    q = _queries(layer, h, rows.positions, group, config, heads)
    o, _, _ = attention(q, *stored, rows.k_start, rows.k_end, scale=config.head_dim**-0.5)
    return o


def start_queries(
    layer: Layer, h: Hidden, positions: RowInts, *, config: ModelConfig
) -> tuple[Heads, AttentionOutput]:
    """Rotated queries of all heads, and their attention over no keys yet, with f32 outputs."""
    q = _queries(layer, h, positions, 0, config, config.num_heads)
    return q, nothing_seen(q)


def accumulate(
    attended: AttentionOutput,
    q: Heads,
    rows: Rows,
    part: KeysValues,
    start: Scalar,
    *,
    config: ModelConfig,
    attention: AttentionFn,
) -> tuple[AttentionOutput, Array]:
    """Merge the attention over a chunk of keys and values that begins at row `start` into `attended`, which
    is to be donated.

    Returns it, and an array to wait for that is not donated.
    """
    keys = part[0].shape[0]
    first, last = (jnp.clip(bound - start, 0, keys) for bound in (rows.k_start, rows.k_end))
    seen = first < last
    first, last = jnp.where(seen, first, 0), jnp.where(seen, last, 0)
    parts = attention(q, *part, first, last, scale=config.head_dim**-0.5)
    merged = merge([attended, AttentionOutput(*parts)])
    return merged, merged.l[0, 0]


def finish(
    layer: Layer, h: Hidden, outputs: list[Heads], *, config: ModelConfig, grouped_matmul: GroupedMatmulFn
) -> Hidden:
    """The rows after the layer, from those before it and the attention outputs of all groups of heads."""
    if "experts_gate" in layer:
        gate, up, down = (layer[f"experts_{name}"] for name in ("gate", "up", "down"))
        layer = {**layer, "experts": Experts(gate, up, down, 0, gate.shape[0])}
    o = jnp.concatenate(outputs, axis=1).reshape(h.shape[0], -1).astype(h.dtype)
    h = h + linear(o, layer["o"])
    return h + ffn_branch(layer, config, h, grouped_matmul)


def _queries(
    layer: Layer, h: Hidden, positions: RowInts, group: Scalar, config: ModelConfig, heads: int
) -> Heads:
    x = rms_norm(h, layer["attn_norm"], config.rms_norm_eps)
    q = project_heads(layer, config, "q", x, (group * heads, heads))
    return rotate(q, *cos_sin(config.rope, config.head_dim, positions))
