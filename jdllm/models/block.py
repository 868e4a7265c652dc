"""One layer of the transformer, in parts: projections, attention branch and feed-forward branch."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor
from jdllm.layers import linear, rms_norm, rotate, swiglu
from jdllm.models.config import ModelConfig
from jdllm.models.moe import GroupedMatmulFn, moe_ffn

Hidden = Float[Array, "rows hidden"]
RowInts = Int[Tensor, " rows"]
Layer = Mapping[str, Any]
AttentionFn = Callable[..., tuple[Array, Array, Array]]


class Rows(NamedTuple):
    """What each packed row is, beside its token.

    - `positions`: absolute position in its sequence, for the rotary embedding.
    - `k_start`, `k_end`: the range of rows whose keys it sees; empty for padding.
    """

    positions: RowInts
    k_start: RowInts
    k_end: RowInts


def block(
    layer: Layer,
    config: ModelConfig,
    h: Hidden,
    rotation: tuple[Array, Array],
    rows: Rows,
    attention: AttentionFn,
    grouped_matmul: GroupedMatmulFn,
) -> Hidden:
    """One layer: attention and feed-forward branches, each added to the residual stream."""
    k, v, q = project(layer, config, h, rotation, ("k", "v", "q"))
    h = h + attend(layer, config, q, (k, v), rows, attention)
    return h + ffn_branch(layer, config, h, grouped_matmul)


def project(
    layer: Layer, config: ModelConfig, h: Hidden, rotation: tuple[Array, Array], names: tuple[str, ...]
) -> tuple[Array, ...]:
    """Some projections of `h`, each `[rows, heads, head_dim]`: "q" and "k" rotated, and "v"."""
    heads = zip(names, project_unrotated(layer, config, h, names), strict=True)
    return tuple(y if name == "v" else rotate(y, *rotation) for name, y in heads)


def project_unrotated(
    layer: Layer, config: ModelConfig, h: Hidden, names: tuple[str, ...]
) -> tuple[Array, ...]:
    """`project`, before anything is rotated."""
    x = rms_norm(h, layer["attn_norm"], config.rms_norm_eps)
    if names[0] in _streamed(layer):
        products = zip(names, layer["streamed"].products(x, names), strict=True)
        return tuple(as_heads(layer, config, name, y + layer.get(f"{name}_bias", 0)) for name, y in products)
    return tuple(project_heads(layer, config, name, x, (0, _heads(config, name))) for name in names)


def project_keys_values(
    layer: Layer, config: ModelConfig, h: Hidden, rotation: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Rotated keys and values of `h`, each `[rows, kv_heads, head_dim]`."""
    k, v = project(layer, config, h, rotation, ("k", "v"))
    return k, v


def attention_branch(
    layer: Layer,
    config: ModelConfig,
    h: Hidden,
    rotation: tuple[Array, Array],
    rows: Rows,
    keys_values: tuple[Array, Array],
    attention: AttentionFn,
) -> Hidden:
    """Attention of the rows `h` over `keys_values`, projected back; the residual is not added."""
    (q,) = project(layer, config, h, rotation, ("q",))
    return attend(layer, config, q, keys_values, rows, attention)


def attend(
    layer: Layer,
    config: ModelConfig,
    q: Float[Array, "rows heads head_dim"],
    keys_values: tuple[Array, Array],
    rows: Rows,
    attention: AttentionFn,
) -> Hidden:
    """Attention of rotated queries over `keys_values`, projected back; the residual is not added."""
    o, _, _ = attention(q, *keys_values, rows.k_start, rows.k_end, scale=config.head_dim**-0.5)
    return linear(o.reshape(q.shape[0], -1), layer["o"])


def project_heads(
    layer: Layer, config: ModelConfig, name: str, x: Hidden, heads: tuple[Int[Array, ""] | int, int]
) -> Float[Array, "rows heads head_dim"]:
    """Some heads of a projection, with bias and norm where the model has them; not rotated.

    Arguments:
    - `name`: "q", "k" or "v".
    - `x`: normed rows.
    - `heads`: the first head, which may be known on the device only, and how many.
    """
    start, size = heads[0] * config.head_dim, heads[1] * config.head_dim
    weight, bias = layer[name], layer.get(f"{name}_bias")
    if size < weight.shape[0]:
        weight = lax.dynamic_slice_in_dim(weight, start, size)
        bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, size)
    return as_heads(layer, config, name, linear(x, weight, bias))


def as_heads(
    layer: Layer, config: ModelConfig, name: str, y: Float[Array, "rows outputs"]
) -> Float[Array, "rows heads head_dim"]:
    """A projection by heads, normed where the model norms it."""
    y = y.reshape(y.shape[0], -1, config.head_dim)
    norm = layer.get(f"{name}_norm")
    return y if norm is None else rms_norm(y, norm, config.rms_norm_eps)


def ffn_branch(layer: Layer, config: ModelConfig, h: Hidden, grouped_matmul: GroupedMatmulFn) -> Hidden:
    """Feed-forward of the rows `h`, dense or by experts; the residual is not added."""
    x = rms_norm(h, layer["ffn_norm"], config.rms_norm_eps)
    if "gate" in _streamed(layer):
        return linear(layer["streamed"].products(x, ("gate", "up"), gated=True)[0], layer["down"])
    if config.moe is None or "experts" not in layer:
        return swiglu(x, layer["gate"], layer["up"], layer["down"])
    bias = layer.get("expert_bias")
    return moe_ffn(x, layer["router"], bias, layer["experts"], config.moe.top_k, grouped_matmul)


def _streamed(layer: Layer) -> Collection[str]:
    """Weights of the layer that are read from the stack of all (`jdllm.execution.few_rows.streamed`)."""
    return layer["streamed"].weights if "streamed" in layer else ()


def _heads(config: ModelConfig, name: str) -> int:
    return config.num_heads if name == "q" else config.num_kv_heads
