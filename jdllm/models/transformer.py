"""The one transformer: packed rows in, hidden rows out.

Every array has a flat row axis that holds the rows of all segments one after another; which keys a row
attends to is its range [k_start, k_end) of rows. Nothing here knows about batches or padding.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor
from jdllm.models.config import ModelConfig
from jdllm.models.layers import add_by_chunks, head_logits, linear, rms_norm, swiglu
from jdllm.models.rotary import cos_sin, rotate
from jdllm.models.weights import Params, head_weights
from jdllm.pallas.attention import attention as default_attention
from jdllm.planning.chunks import ChunkConfig

Hidden = Float[Array, "rows hidden"]
RowInts = Int[Tensor, " rows"]
Layer = dict[str, Array]
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
) -> Hidden:
    """Run all layers over packed rows.

    Arguments:
    - `params`: weights as `jdllm.models.weights.spec_tree` describes them.
    - `config`: the model; static.
    - `tokens`: int32 ids of all rows.
    - `rows`: positions and key ranges.
    - `chunks`: chunk counts; static.
    - `attention`: the attention to use, with the contract of `jdllm.pallas.attention.attention`.

    Returns the hidden rows after the last layer, before the final norm, in the dtype of the weights.
    """
    rotation = cos_sin(config.rope, config.head_dim, rows.positions)

    def body(h: Hidden, layer: Layer) -> tuple[Hidden, None]:
        return block(layer, config, h, rotation, rows, chunks, attention), None

    return lax.scan(body, embed(params, tokens), params["layers"])[0]


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
) -> Hidden:
    """One layer: attention and feed-forward branches, each added to the residual stream."""
    keys_values = project_keys_values(layer, config, h, rotation)

    def attend(start: int, stop: int) -> Hidden:
        h_part, rotation_part, rows_part = jax.tree.map(lambda x: x[start:stop], (h, rotation, rows))
        return attention_branch(layer, config, h_part, rotation_part, rows_part, keys_values, attention)

    h_attended = add_by_chunks(h, attend, chunks.query)

    def feed_forward(start: int, stop: int) -> Hidden:
        return ffn_branch(layer, config, h_attended[start:stop])

    return add_by_chunks(h_attended, feed_forward, chunks.ffn)


def project_keys_values(
    layer: Layer, config: ModelConfig, h: Hidden, rotation: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Rotated keys and values of `h`, each `[rows, kv_heads, head_dim]`."""
    x = rms_norm(h, layer["attn_norm"], config.rms_norm_eps)
    shape = (h.shape[0], config.num_kv_heads, config.head_dim)
    return rotate(linear(x, layer["k"]).reshape(shape), *rotation), linear(x, layer["v"]).reshape(shape)


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
    q = linear(x, layer["q"]).reshape(h.shape[0], config.num_heads, config.head_dim)
    o, _, _ = attention(
        rotate(q, *rotation), *keys_values, rows.k_start, rows.k_end, scale=config.head_dim**-0.5
    )
    return linear(o.reshape(h.shape[0], -1), layer["o"])


def ffn_branch(layer: Layer, config: ModelConfig, h: Hidden) -> Hidden:
    """Feed-forward of the rows `h`; the residual is not added."""
    x = rms_norm(h, layer["ffn_norm"], config.rms_norm_eps)
    return swiglu(x, layer["gate"], layer["up"], layer["down"])


def final_norm(params: Params, config: ModelConfig, h: Hidden) -> Hidden:
    """The norm before the head."""
    return rms_norm(h, params["final_norm"], config.rms_norm_eps)


def logits(params: Params, config: ModelConfig, h: Hidden) -> Float[Array, "rows vocab"]:
    """f32 logits of the given hidden rows; pass only the rows that need them."""
    return head_logits(final_norm(params, config, h), head_weights(params))
