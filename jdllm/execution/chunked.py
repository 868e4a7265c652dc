"""The layers in row chunks and head groups, for contexts whose activations do not fit as a whole.

The layers are unrolled and the chunks of an operator are a device loop that slices the stacked weights inside
its body: XLA reads a slice at a constant place without a copy. A device loop inside a scan over the layers
would copy each layer's weights. Everything that grows with the rows is updated in place.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.chunks import ChunkConfig, chunk_rows
from jdllm.layers import linear, rms_norm, rotate
from jdllm.models.block import (
    AttentionFn,
    Hidden,
    Rows,
    attention_branch,
    ffn_branch,
    project_heads,
    project_keys_values,
)
from jdllm.models.config import ModelConfig
from jdllm.models.moe import GroupedMatmulFn, experts_of
from jdllm.models.rotary import cos_sin
from jdllm.models.weights import Params, layer_runs

Start = Int[Array, ""] | int


class LayerView(Mapping[str, Any]):
    """The weights of one layer, sliced from their stacks where they are read.

    Arguments:
    - `stack`: stacked leaves `[layers, ...]`.
    - `place`: the layer's place in the stack.
    """

    def __init__(self, stack: Mapping[str, Any], place: int):
        self._stack = dict(stack)
        self._experts = experts_of(self._stack)
        self._place = place

    def __getitem__(self, name: str) -> Any:
        if name == "experts" and self._experts is not None:
            return self._experts.of_layer(self._place)
        return self._stack[name][self._place]

    def __iter__(self) -> Iterator[str]:
        yield from self._stack
        if self._experts is not None:
            yield "experts"

    def __len__(self) -> int:
        return len(self._stack) + (self._experts is not None)


def run_layers(
    params: Params,
    config: ModelConfig,
    h: Hidden,
    rows: Rows,
    chunks: ChunkConfig,
    attention: AttentionFn,
    grouped_matmul: GroupedMatmulFn,
) -> Hidden:
    """Apply all layers to `h` with the chunk counts of `chunks`; the result is that of the whole operators.

    Raises `ValueError` where `chunks.heads` does not divide the key-value heads.
    """
    after = layer_by_layer(params, config, h, rows, chunks, attention, grouped_matmul)
    return deque(after, maxlen=1).pop()


def layer_by_layer(
    params: Params,
    config: ModelConfig,
    h: Hidden,
    rows: Rows,
    chunks: ChunkConfig,
    attention: AttentionFn,
    grouped_matmul: GroupedMatmulFn,
) -> Iterator[Hidden]:
    """The hidden rows after each layer, as of `run_layers`."""
    if config.num_kv_heads % chunks.heads:
        raise ValueError(f"{chunks.heads} head groups do not divide {config.num_kv_heads} key-value heads")
    chunks = chunks.in_loops()
    attend = _attend_whole if chunks.heads == 1 else _attend_by_groups
    for name, start, end in layer_runs(config):
        for place in range(start, end):
            layer = LayerView(params[name], place)
            h = attend(layer, config, h, rows, chunks, attention)
            h = _feed_forward(layer, config, h, chunks.ffn, grouped_matmul)
            yield h


def over_chunks[Carry](
    rows: int, count: int, body: Callable[[Carry, Start, int], Carry], carry: Carry
) -> Carry:
    """Fold `body(carry, start, size)` over at most `count` chunks of `rows`, in order.

    All chunks but the last have the same size and run in a device loop; the rest runs by itself.
    """
    size = chunk_rows(rows, count)
    if size == rows:
        return body(carry, 0, rows)
    carry = lax.fori_loop(0, rows // size, lambda i, carry: body(carry, i * size, size), carry)
    return body(carry, rows - rows % size, rows % size) if rows % size else carry


def _window(tree: Any, start: Start, size: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(jnp.asarray(x), start, size), tree)


def _rotation(config: ModelConfig, rows: Rows, start: Start, size: int) -> tuple[Array, Array]:
    return cos_sin(config.rope, config.head_dim, _window(rows.positions, start, size))


def _add(h: Hidden, start: Start, branch: Hidden) -> Hidden:
    part = lax.dynamic_slice_in_dim(h, start, branch.shape[0])
    return lax.dynamic_update_slice_in_dim(h, part + branch, start, 0)


def _room(h: Hidden, shape: tuple[int, ...], place: int = 0) -> Array:
    """An array to be overwritten, which XLA cannot allot before it has `h`.

    An empty or constant array depends on nothing: it would be made, and kept, long before it is needed.
    """
    return jnp.broadcast_to(h[0, place], shape)


def _room_for_keys_values(h: Hidden, kv_heads: int, config: ModelConfig) -> tuple[Array, Array]:
    shape = (h.shape[0], kv_heads, config.head_dim)
    return _room(h, shape, 0), _room(h, shape, 1)


def _attend_whole(
    layer: LayerView, config: ModelConfig, h: Hidden, rows: Rows, chunks: ChunkConfig, attention: AttentionFn
) -> Hidden:
    """Attention with the keys and values of all heads at once."""

    def project(keys_values: tuple[Array, Array], start: Start, size: int) -> tuple[Array, Array]:
        rotation = _rotation(config, rows, start, size)
        part = project_keys_values(layer, config, _window(h, start, size), rotation)
        k, v = (
            lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(keys_values, part, strict=True)
        )
        return k, v

    keys_values = over_chunks(
        h.shape[0], chunks.kv, project, _room_for_keys_values(h, config.num_kv_heads, config)
    )

    def attend(h: Hidden, start: Start, size: int) -> Hidden:
        h_part, rows_part = _window((h, rows), start, size)
        rotation = _rotation(config, rows, start, size)
        return _add(
            h, start, attention_branch(layer, config, h_part, rotation, rows_part, keys_values, attention)
        )

    return over_chunks(h.shape[0], chunks.query, attend, h)


def _attend_by_groups(
    layer: LayerView, config: ModelConfig, h: Hidden, rows: Rows, chunks: ChunkConfig, attention: AttentionFn
) -> Hidden:
    """Attention with the keys and values of one group of heads at a time.

    The outputs of all groups are kept, so that the output projection is one product over all heads.
    """
    kv_heads, heads = config.num_kv_heads // chunks.heads, config.num_heads // chunks.heads
    scale = config.head_dim**-0.5

    def attend_group(group: Start, attended: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
        def projected(name: str, size: int, start: Start, count: int) -> Float[Array, "rows heads head_dim"]:
            part = _window(h, start, count)
            x = rms_norm(part, layer["attn_norm"], config.rms_norm_eps)
            return project_heads(layer, config, name, x, (group * size, size))

        def project(keys_values: tuple[Array, Array], start: Start, count: int) -> tuple[Array, Array]:
            k = rotate(projected("k", kv_heads, start, count), *_rotation(config, rows, start, count))
            part = (k, projected("v", kv_heads, start, count))
            k, v = (
                lax.dynamic_update_slice_in_dim(x, y, start, 0)
                for x, y in zip(keys_values, part, strict=True)
            )
            return k, v

        keys_values = over_chunks(h.shape[0], chunks.kv, project, _room_for_keys_values(h, kv_heads, config))

        def attend(attended: Array, start: Start, count: int) -> Array:
            q = rotate(projected("q", heads, start, count), *_rotation(config, rows, start, count))
            rows_part = _window(rows, start, count)
            o, _, _ = attention(q, *keys_values, rows_part.k_start, rows_part.k_end, scale=scale)
            at = (start, group * heads * config.head_dim)
            return lax.dynamic_update_slice(attended, o.reshape(count, -1), at)

        return over_chunks(h.shape[0], chunks.query, attend, attended)

    attended = _room(h, (h.shape[0], config.num_heads * config.head_dim), 2)
    attended = lax.fori_loop(0, chunks.heads, attend_group, attended)

    def project_back(h: Hidden, start: Start, count: int) -> Hidden:
        return _add(h, start, linear(_window(attended, start, count), layer["o"]))

    return over_chunks(h.shape[0], chunks.query, project_back, h)


def _feed_forward(
    layer: LayerView, config: ModelConfig, h: Hidden, count: int, grouped_matmul: GroupedMatmulFn
) -> Hidden:
    def feed_forward(h: Hidden, start: Start, size: int) -> Hidden:
        return _add(h, start, ffn_branch(layer, config, _window(h, start, size), grouped_matmul))

    return over_chunks(h.shape[0], count, feed_forward, h)
