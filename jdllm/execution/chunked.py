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
from jdllm.execution.arriving import arrived
from jdllm.models.block import Hidden, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import ALL_HEADS, Group, Heads, KeysValues, Layer, Ranges
from jdllm.models.leaf import InStack
from jdllm.models.moe import experts_of
from jdllm.models.rotary import Rotation, rotation_at
from jdllm.models.weights import HOST_LAYERS, Params, layer_runs
from jdllm.pallas.attention import attention
from jdllm.quantised import Quantised

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
        stack = self._stack[name]
        return InStack(stack, self._place) if isinstance(stack, Quantised) else stack[self._place]

    def __iter__(self) -> Iterator[str]:
        yield from self._stack
        if self._experts is not None:
            yield "experts"

    def __len__(self) -> int:
        return len(self._stack) + (self._experts is not None)


def run_layers(params: Params, config: ModelConfig, h: Hidden, rows: Rows, chunks: ChunkConfig) -> Hidden:
    """Apply all layers to `h` with the chunk counts of `chunks`; whole operators give the same result.

    Raises `ValueError` where `chunks.heads` does not divide the key-value heads.
    """
    return last_of(layer_by_layer(params, config, h, rows, chunks))


def layer_by_layer(
    params: Params, config: ModelConfig, h: Hidden, rows: Rows, chunks: ChunkConfig
) -> Iterator[Hidden]:
    """Apply the layers to `h` one by one, in chunks; yields the hidden rows after each."""
    if config.num_kv_heads % chunks.heads:
        raise ValueError(f"{chunks.heads} head groups do not divide {config.num_kv_heads} key-value heads")
    chunks = chunks.in_loops()

    def body(h: Hidden, layer: Layer) -> Hidden:
        if chunks.heads == 1:
            keys_values = keys_values_in_chunks(layer, h, rows, chunks.kv)
            h = attend_in_chunks(layer, h, rows, keys_values, chunks.query)
        else:
            h = _attend_by_groups(layer, h, rows, chunks)
        return feed_forward_in_chunks(layer, h, chunks.ffn)

    yield from unrolled(params, config, h, body)


def unrolled[Carry](
    params: Params, config: ModelConfig, carry: Carry, body: Callable[[Carry, Layer], Carry]
) -> Iterator[Carry]:
    """Apply `body(carry, layer)` for every layer in order; yields what each of them returns.

    The weights of a layer are sliced from their stack where they are read. A layer out of host memory arrives
    behind the layer before.
    """
    runs = ((name, place) for name, start, end in layer_runs(config) for place in range(start, end))
    for number, (name, place) in enumerate(runs):
        stack = params[name]
        if name == HOST_LAYERS:
            stack, carry = lax.optimization_barrier((stack, carry))
            stack, place = arrived(stack, place), 0
        carry = body(carry, Layer(LayerView(stack, place), config, number))
        yield carry


def last_of[Carry](carries: Iterator[Carry]) -> Carry:
    """What the last layer returns."""
    return deque(carries, maxlen=1).pop()


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


def _rotation(config: ModelConfig, rows: Rows, start: Start, size: int) -> Rotation:
    return rotation_at(config.rope, config.head_dim, _window(rows.positions, start, size))


def _add(h: Hidden, start: Start, branch: Hidden) -> Hidden:
    part = lax.dynamic_slice_in_dim(h, start, branch.shape[0])
    return lax.dynamic_update_slice_in_dim(h, part + branch, start, 0)


def _room(h: Hidden, shape: tuple[int, ...], place: int = 0) -> Array:
    """An array to be overwritten, which XLA cannot allot before it has `h`.

    An empty or constant array depends on nothing: it would be made, and kept, long before it is needed.
    """
    return jnp.broadcast_to(h[0, place], shape)


def keys_values_in_chunks(
    layer: Layer, h: Hidden, rows: Rows, count: int, group: Group = ALL_HEADS
) -> KeysValues:
    """Keys and values of all rows, for one group of heads, projected in `count` chunks."""
    shape = (h.shape[0], layer.config.num_kv_heads // group.count, layer.config.head_dim)

    def project(keys_values: KeysValues, start: Start, size: int) -> KeysValues:
        rotation = _rotation(layer.config, rows, start, size)
        part = layer.project(_window(h, start, size), rotation, ("k", "v"), group)
        k, v = (
            lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(keys_values, part, strict=True)
        )
        return k, v

    return over_chunks(h.shape[0], count, project, (_room(h, shape, 0), _room(h, shape, 1)))


def _attended(
    layer: Layer, h: Hidden, rows: Rows, keys_values: KeysValues, start: Start, size: int, group: Group
) -> Heads:
    """Attention of a chunk of rows over the keys and values of all rows, for one group of heads."""
    h, rows = _window((h, rows), start, size)
    rotation = rotation_at(layer.config.rope, layer.config.head_dim, rows.positions)
    return Ranges(rows, rotation, attention, keys_values).attend(layer, h, group)[0]


def attend_in_chunks(layer: Layer, h: Hidden, rows: Rows, keys_values: KeysValues, count: int) -> Hidden:
    """Add attention over the keys and values of all rows and heads, in `count` chunks of rows."""

    def attend(h: Hidden, start: Start, size: int) -> Hidden:
        o = _attended(layer, h, rows, keys_values, start, size, ALL_HEADS)
        return _add(h, start, layer.project_back(o))

    return over_chunks(h.shape[0], count, attend, h)


def _attend_by_groups(layer: Layer, h: Hidden, rows: Rows, chunks: ChunkConfig) -> Hidden:
    """Attention with the keys and values of one group of heads at a time.

    The outputs of all groups are kept, so that the output projection is one product over all heads.
    """
    heads, head_dim = layer.config.num_heads // chunks.heads, layer.config.head_dim

    def attend_group(index: Start, attended: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
        group = Group(index, chunks.heads)
        keys_values = keys_values_in_chunks(layer, h, rows, chunks.kv, group)

        def attend(attended: Array, start: Start, size: int) -> Array:
            o = _attended(layer, h, rows, keys_values, start, size, group)
            at = (start, index * heads * head_dim)
            return lax.dynamic_update_slice(attended, o.reshape(size, -1), at)

        return over_chunks(h.shape[0], chunks.query, attend, attended)

    attended = _room(h, (h.shape[0], layer.config.num_heads * head_dim), 2)
    attended = lax.fori_loop(0, chunks.heads, attend_group, attended)

    def project_back(h: Hidden, start: Start, size: int) -> Hidden:
        return _add(h, start, layer.project_back(_window(attended, start, size)))

    return over_chunks(h.shape[0], chunks.query, project_back, h)


def feed_forward_in_chunks(layer: Layer, h: Hidden, count: int) -> Hidden:
    """Add the feed-forward branch, in `count` chunks of rows."""

    def feed_forward(h: Hidden, start: Start, size: int) -> Hidden:
        return _add(h, start, layer.feed_forward(_window(h, start, size)))

    return over_chunks(h.shape[0], count, feed_forward, h)
