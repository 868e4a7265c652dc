"""The executables of a causal sequence that runs layer by layer, whose keys do not all fit on the device.

A layer is one executable: rows go through it in chunks, each of which sees the keys of the chunks before.
What grows with the sequence is the residual stream, which is updated in place, and the keys and values of a
layer, which may leave for host memory while the next layer is computed. Tokens behind the prompt see these
and the few rows that were generated, in two parts that log-sum-exp puts together.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.execution.offload.parts import Scalar, take_layer
from jdllm.models.block import Hidden
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Heads, KeysValues, Layer, Weights
from jdllm.models.rotary import Rotation, rotation_at
from jdllm.models.visibility import causal_range
from jdllm.pallas.attention import AttentionOutput, attention, merge, nothing_seen

SEEN_AT_ONCE = 16384
"""Keys of the prompt that a generated row sees at a time, at most."""


class Layering(NamedTuple):
    """How a sequence is run.

    - `rows`: of the arrays of its prompt, whole chunks of `chunk`.
    - `generated`: rows of the arrays for tokens behind it.
    - `kept`, `kept_behind`: how many of the last layers have their keys and values on the device while the
      prompt is read, and while tokens are generated.
    - `stored`: rows of these keys and values: all rows, or those that a layer keeps.
    """

    rows: int
    chunk: int
    generated: int
    kept: int
    kept_behind: int
    stored: int


class Generated(NamedTuple):
    """Rotated keys and values of the rows behind the prompt, of all layers."""

    k: Float[Array, "layers tokens kv_heads head_dim"]
    v: Float[Array, "layers tokens kv_heads head_dim"]


class Before(NamedTuple):
    """A chunk of rows of a prompt that see the rows before them and each other: a `Sees`.

    - `stored`: keys and values of all rows; the chunk's own are added.
    - `start`: first row of the chunk.
    """

    stored: KeysValues
    start: Scalar

    def attend(self, layer: Layer, h: Hidden) -> tuple[Heads, KeysValues]:
        config = layer.config
        positions, rotation = at_positions(config, self.start, h.shape[0])
        k, v, q = layer.project(h, rotation, ("k", "v", "q"))
        stored = placed(self.stored, (k, v), self.start)
        bounds = causal_range(config, positions)
        return attention(q, *stored, *bounds, scale=config.attention_scale)[0], stored


class Prompt(NamedTuple):
    """One row of a prompt, whose keys are all stored: a `Sees`.

    - `stored`: keys and values of all rows.
    - `position`: of the row, `[1]`.
    """

    stored: KeysValues
    position: Int[Array, " rows"]

    def attend(self, layer: Layer, h: Hidden) -> tuple[Heads, None]:
        config = layer.config
        (q,) = layer.project(h, rotation_at(config.rope, config.head_dim, self.position), ("q",))
        return over_prompt(q, self.stored, *causal_range(config, self.position), config=config).o, None


class Behind(NamedTuple):
    """One row behind a prompt, which is stored and sees the prompt and the rows between: a `Sees`.

    - `prompt`: keys and values of the first `length` rows.
    - `generated`: keys and values of the `count` rows between.
    """

    prompt: KeysValues
    generated: Generated
    length: Int[Array, ""]
    count: Int[Array, ""]

    def attend(self, layer: Layer, h: Hidden) -> tuple[Heads, Generated]:
        config, number, length, count = layer.config, layer.number, self.length, self.count
        position = (length + count)[None]
        k, v, q = layer.project(h, rotation_at(config.rope, config.head_dim, position), ("k", "v", "q"))
        generated = Generated(
            *(
                lax.dynamic_update_slice(x, row[None].astype(x.dtype), (number, count, 0, 0))
                for x, row in zip(self.generated, (k, v), strict=True)
            )
        )
        own_k, own_v = (lax.dynamic_index_in_dim(x, number, keepdims=False) for x in generated)
        first, _ = causal_range(config, position)
        before = over_prompt(q, self.prompt, first, length[None], config=config)
        start = jnp.clip(first - length, 0, count)
        return merge([before, _over_few(q, (own_k, own_v), start, count[None] + 1, config)]).o, generated


def prefill_layer(
    stack: Weights, place: Scalar, h: Hidden, length: Scalar, *, config: ModelConfig, chunk: int
) -> tuple[Hidden, KeysValues, Array]:
    """One layer over all rows of a prompt.

    Arguments:
    - `stack`, `place`: the weights of like layers, and the place of this layer among them.
    - `h`: the residual stream, in whole chunks, to be donated. Rows from `length` on mean nothing.
    - `length`: tokens of the prompt.
    - `chunk`: rows that are computed at a time; static.

    Returns the rows after the layer, its rotated keys and values, and an array to wait for.
    """
    layer = Layer(take_layer(stack, place), config)

    def body(index: Array, carry: tuple[Hidden, KeysValues]) -> tuple[Hidden, KeysValues]:
        h, stored = carry
        start = index * chunk
        rows, stored = layer.apply(lax.dynamic_slice_in_dim(h, start, chunk), Before(stored, start))
        return lax.dynamic_update_slice_in_dim(h, rows, start, 0), stored

    chunks = chunks_of(jnp.asarray(length), chunk)
    h, stored = lax.fori_loop(0, chunks, body, (h, no_keys(config, h)))
    return h, stored, h[0, :1]


def last_layer(
    stack: Weights, place: Scalar, h: Hidden, length: Scalar, *, config: ModelConfig, chunk: int
) -> tuple[Hidden, KeysValues]:
    """The last layer for a prompt of which only the last row is wanted: other rows get keys and values only.

    Arguments:
    - `stack`, `place`: the weights of like layers, and the place of this layer among them.
    - `h`: the residual stream, in whole chunks; not donated. Rows from `length` on mean nothing.
    - `length`: tokens of the prompt.
    - `chunk`: rows that are computed at a time; static.

    Returns the last row, `[1, hidden]`, and the keys and values.
    """
    layer, length = Layer(take_layer(stack, place), config), jnp.asarray(length)
    stored = all_keys(layer, h, length, chunk)
    row = lax.dynamic_slice_in_dim(h, length - 1, 1)
    return layer.apply(row, Prompt(stored, (length - 1)[None]))[0], stored


def generate_layer(
    stack: Weights,
    place: Scalar,
    number: Scalar,
    h: Hidden,
    prompt: KeysValues,
    generated: Generated,
    length: Scalar,
    count: Scalar,
    *,
    config: ModelConfig,
) -> tuple[Hidden, Generated, Array]:
    """One layer for one row behind the prompt.

    Arguments:
    - `stack`, `place`: the weights of like layers, and the place of this layer among them.
    - `number`: of the layer in the model.
    - `h`: the row, `[1, hidden]`.
    - `prompt`: keys and values of the first `length` rows.
    - `generated`: keys and values of the `count` rows between, to be donated; the row's own are added.

    Returns the row after the layer, `generated`, and an array to wait for.
    """
    layer = Layer(take_layer(stack, place), config, number)
    h, generated = layer.apply(h, Behind(prompt, generated, jnp.asarray(length), jnp.asarray(count)))
    return h, generated, h[0, :1]


def over_prompt(
    q: Heads,
    keys_values: KeysValues,
    start: Int[Array, " rows"],
    end: Int[Array, " rows"],
    *,
    config: ModelConfig,
) -> AttentionOutput:
    """Attention of a row over the keys and values in [start, end), `SEEN_AT_ONCE` at a time, with f32
    outputs."""
    rows = keys_values[0].shape[0]
    size = min(SEEN_AT_ONCE, rows)

    def turn(index: Array, before: AttentionOutput) -> AttentionOutput:
        # The last part begins earlier, where it would reach beyond the rows: what was seen is left out.
        begin = jnp.minimum(index * size, rows - size)
        k, v = (lax.dynamic_slice_in_dim(x, begin, size) for x in keys_values)
        bounds = jnp.maximum(start, index * size) - begin, end - begin
        return merge([before, _over_few(q, (k, v), *bounds, config)])

    turns = (end.max() + size - 1) // size
    return lax.fori_loop(start.min() // size, turns, turn, nothing_seen(q))


def _over_few(
    q: Heads,
    keys_values: KeysValues,
    start: Int[Array, " rows"],
    end: Int[Array, " rows"],
    config: ModelConfig,
) -> AttentionOutput:
    """Attention of a row with all scores in memory; values that it does not see count for nothing, whatever
    they are."""
    k, v = keys_values
    by_group = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    scores = config.attention_scale * jnp.einsum("qkgd,skd->qkgs", by_group, k, **options)
    at = jnp.arange(k.shape[0])
    seen = (at >= start[:, None]) & (at < end[:, None])
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    m = scores.max(axis=-1)
    p = jnp.exp(scores - jnp.where(jnp.isneginf(m), 0.0, m)[..., None])
    total = p.sum(axis=-1)
    v = jnp.where(seen.any(axis=0)[:, None, None], v, 0)
    o = jnp.einsum("qkgs,skd->qkgd", p.astype(v.dtype), v, **options)
    o = o / jnp.where(total == 0, 1.0, total)[..., None]
    return AttentionOutput(o.reshape(q.shape), m.reshape(q.shape[:2]), total.reshape(q.shape[:2]))


def at_positions(config: ModelConfig, start: Scalar, rows: int) -> tuple[Array, Rotation]:
    """The positions of the rows from `start` on, and their rotation."""
    positions = start + jnp.arange(rows)
    return positions, rotation_at(config.rope, config.head_dim, positions)


def all_keys(layer: Layer, h: Hidden, length: Array, chunk: int) -> KeysValues:
    """Rotated keys and values of the first `length` rows of a sequence, from the rows before the layer.

    Arguments:
    - `h`: in whole chunks.
    - `chunk`: rows that are computed at a time.
    """

    def store(index: Array, stored: KeysValues) -> KeysValues:
        start = index * chunk
        rows, (_, rotation) = (
            lax.dynamic_slice_in_dim(h, start, chunk),
            at_positions(layer.config, start, chunk),
        )
        k, v = layer.project(rows, rotation, ("k", "v"))
        return placed(stored, (k, v), start)

    return lax.fori_loop(0, chunks_of(length, chunk), store, no_keys(layer.config, h))


def chunks_of(length: Array, chunk: int) -> Array:
    """How many chunks so many rows fill."""
    return (length + chunk - 1) // chunk


def no_keys(config: ModelConfig, h: Hidden) -> KeysValues:
    shape = (h.shape[0], config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape, h.dtype), jnp.zeros(shape, h.dtype)


def placed(stored: KeysValues, part: KeysValues, start: Scalar) -> KeysValues:
    k, v = (lax.dynamic_update_slice_in_dim(x, new, start, 0) for x, new in zip(stored, part, strict=True))
    return k, v
