"""The one transformer: packed rows in, hidden rows out.

Every array has a flat row axis that holds the rows of all segments one after another; which keys a row
attends to is its range [k_start, k_end) of rows. Nothing here knows about batches or padding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor
from jdllm.models.config import ModelConfig
from jdllm.models.layers import add_by_chunks, head_logits, linear, rms_norm, swiglu
from jdllm.models.moe import GroupedMatmulFn, experts_of, moe_ffn
from jdllm.models.rotary import cos_sin, rotate
from jdllm.models.weights import Params, head_weights, layer_runs
from jdllm.pallas.attention import attention as default_attention
from jdllm.pallas.grouped_matmul import grouped_matmul as default_grouped_matmul
from jdllm.planning.chunks import ChunkConfig

Hidden = Float[Array, "rows hidden"]
RowInts = Int[Tensor, " rows"]
Layer = dict[str, Any]
AttentionFn = Callable[..., tuple[Array, Array, Array]]

_WHOLE = ChunkConfig()


class Rows(NamedTuple):
    """What each packed row is, beside its token.

    - `positions`: absolute position in its sequence, for the rotary embedding.
    - `k_start`, `k_end`: the range of rows whose keys it sees; empty for padding.
    """

    positions: RowInts
    k_start: RowInts
    k_end: RowInts


def forward(
    params: Params,
    config: ModelConfig,
    tokens: RowInts,
    rows: Rows,
    *,
    chunks: ChunkConfig = _WHOLE,
    attention: AttentionFn = default_attention,
    grouped_matmul: GroupedMatmulFn = default_grouped_matmul,
) -> Hidden:
    """Run all layers over packed rows.

    Arguments:
    - `params`: weights as `jdllm.models.weights.spec_tree` describes them.
    - `config`: the model; static.
    - `tokens`: int32 ids of all rows.
    - `rows`: positions and key ranges; `jdllm.models.visibility.key_ranges` gives those of one sequence.
    - `chunks`: chunk counts; static.
    - `attention`: the attention to use, with the contract of `jdllm.pallas.attention.attention`.
    - `grouped_matmul`: the product of rows with their experts, with the contract of
      `jdllm.pallas.grouped_matmul.grouped_matmul`; models without experts do not call it.

    Returns the hidden rows after the last layer, before the final norm, in the dtype of the weights.
    """
    rotation = cos_sin(config.rope, config.head_dim, rows.positions)

    def body(h: Hidden, layer: Layer) -> Hidden:
        return block(layer, config, h, rotation, rows, chunks, attention, grouped_matmul)

    return scan_layers(params, config, embed(params, tokens), body)


def scan_layers(
    params: Params, config: ModelConfig, h: Hidden, body: Callable[[Hidden, Layer], Hidden]
) -> Hidden:
    """Apply `body(h, layer)` for every layer in order: one device loop for each run of like layers.

    A run that is a whole stack (as all are where every layer is alike, or the first few differ) reads the
    stack in place; of an interleaved model each run's part is copied, but for the experts.
    """
    for name, start, end in layer_runs(config):
        stack = dict(params[name])
        experts = experts_of(stack)
        part = jax.tree.map(lambda leaf, start=start, end=end: leaf[start:end], stack)

        def step(h: Hidden, at: tuple[Layer, Array], experts=experts) -> tuple[Hidden, None]:
            layer, place = at
            return body(h, layer | {"experts": experts.of_layer(place)} if experts else layer), None

        h, _ = lax.scan(step, h, (part, jnp.arange(start, end)))
    return h


def embed(params: Params, tokens: RowInts) -> Hidden:
    """Look up the token embeddings."""
    return params["embed"][tokens]


def block(
    layer: Layer,
    config: ModelConfig,
    h: Hidden,
    rotation: tuple[Array, Array],
    rows: Rows,
    chunks: ChunkConfig,
    attention: AttentionFn,
    grouped_matmul: GroupedMatmulFn,
) -> Hidden:
    """One layer: attention and feed-forward branches, each added to the residual stream."""
    keys_values = project_keys_values(layer, config, h, rotation)

    def attend(start: int, stop: int) -> Hidden:
        h_part, rotation_part, rows_part = jax.tree.map(lambda x: x[start:stop], (h, rotation, rows))
        return attention_branch(layer, config, h_part, rotation_part, rows_part, keys_values, attention)

    h_attended = add_by_chunks(h, attend, chunks.query)

    def feed_forward(start: int, stop: int) -> Hidden:
        return ffn_branch(layer, config, h_attended[start:stop], grouped_matmul)

    return add_by_chunks(h_attended, feed_forward, chunks.ffn)


def project_keys_values(
    layer: Layer, config: ModelConfig, h: Hidden, rotation: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Rotated keys and values of `h`, each `[rows, kv_heads, head_dim]`."""
    x = rms_norm(h, layer["attn_norm"], config.rms_norm_eps)
    k, v = (_heads(layer, config, name, x, config.num_kv_heads) for name in ("k", "v"))
    return rotate(k, *rotation), v


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
    x = rms_norm(h, layer["attn_norm"], config.rms_norm_eps)
    q = rotate(_heads(layer, config, "q", x, config.num_heads), *rotation)
    o, _, _ = attention(q, *keys_values, rows.k_start, rows.k_end, scale=config.head_dim**-0.5)
    return linear(o.reshape(h.shape[0], -1), layer["o"])


def _heads(
    layer: Layer, config: ModelConfig, name: str, x: Hidden, heads: int
) -> Float[Array, "rows heads head_dim"]:
    """A projection by its name, with bias and norm where the model has them; not rotated."""
    y = linear(x, layer[name], layer.get(f"{name}_bias")).reshape(x.shape[0], heads, config.head_dim)
    norm = layer.get(f"{name}_norm")
    return y if norm is None else rms_norm(y, norm, config.rms_norm_eps)


def ffn_branch(layer: Layer, config: ModelConfig, h: Hidden, grouped_matmul: GroupedMatmulFn) -> Hidden:
    """Feed-forward of the rows `h`, dense or by experts; the residual is not added."""
    x = rms_norm(h, layer["ffn_norm"], config.rms_norm_eps)
    if config.moe is None or "experts" not in layer:
        return swiglu(x, layer["gate"], layer["up"], layer["down"])
    bias = layer.get("expert_bias")
    return moe_ffn(x, layer["router"], bias, layer["experts"], config.moe.top_k, grouped_matmul)


def final_norm(params: Params, config: ModelConfig, h: Hidden) -> Hidden:
    """The norm before the head."""
    return rms_norm(h, params["final_norm"], config.rms_norm_eps)


def logits(params: Params, config: ModelConfig, h: Hidden) -> Float[Array, "rows vocab"]:
    """f32 logits of the given hidden rows; pass only the rows that need them."""
    return head_logits(final_norm(params, config, h), head_weights(params))
