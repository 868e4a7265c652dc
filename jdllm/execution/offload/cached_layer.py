"""The executables of a sequence with a dual cache that runs layer by layer, whose keys do not all fit on the
device.

A layer is one executable. A refresh computes the keys and values of all rows in chunks, and then the rows in
chunks, each of which sees all keys. A reuse computes a few rows in the middle of the sequence, whose keys and
values take the place of older ones.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jdllm.execution.offload.layered import all_keys, at_positions, chunks_of, placed
from jdllm.execution.offload.parts import Scalar, take_layer
from jdllm.models.block import Hidden, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Heads, KeysValues, Layer, Ranges, Weights
from jdllm.pallas.attention import attention


class Within(NamedTuple):
    """Rows that follow one another inside a sequence whose keys are stored, and that see all of them: a
    `Sees`.

    - `stored`: keys and values of all rows; the rows' own take their place among them.
    - `start`: the position of the first row.
    - `length`: of the sequence; rows of `stored` behind it are not seen.
    """

    stored: KeysValues
    start: Scalar
    length: Scalar

    def attend(self, layer: Layer, h: Hidden) -> tuple[Heads, KeysValues]:
        _, rotation = at_positions(layer.config, self.start, h.shape[0])
        k, v, q = layer.project(h, rotation, ("k", "v", "q"))
        stored = placed(self.stored, (k, v), self.start)
        first = jnp.zeros(h.shape[0], jnp.int32)
        scale = layer.config.attention_scale
        return attention(q, *stored, first, first + self.length, scale=scale)[0], stored


def refresh_layer(
    stack: Weights, place: Scalar, h: Hidden, length: Scalar, *, config: ModelConfig, chunk: int
) -> tuple[Hidden, KeysValues, Array]:
    """One layer over all rows of a sequence, each of which sees all of them.

    Arguments:
    - `stack`, `place`: the weights of like layers, and the place of this layer among them.
    - `h`: the residual stream, in whole chunks, to be donated. Rows from `length` on mean nothing.
    - `length`: tokens of the sequence.
    - `chunk`: rows that are computed at a time; static.

    Returns the rows after the layer, its rotated keys and values, and an array to wait for.
    """
    layer, length = Layer(take_layer(stack, place), config), jnp.asarray(length)
    stored = all_keys(layer, h, length, chunk)

    def update(index: Array, h: Hidden) -> Hidden:
        rows = _seeing_all(layer, h, stored, index * chunk, chunk, length)
        return lax.dynamic_update_slice_in_dim(h, rows, index * chunk, 0)

    h = lax.fori_loop(0, chunks_of(length, chunk), update, h)
    return h, stored, h[0, :1]


def last_refresh_layer(
    stack: Weights,
    place: Scalar,
    h: Hidden,
    length: Scalar,
    start: Scalar,
    *,
    config: ModelConfig,
    chunk: int,
    rows: int,
) -> tuple[Hidden, KeysValues]:
    """The last layer of a refresh, of which only a few rows are wanted: others get keys and values only.

    Arguments:
    - `stack`, `place`: the weights of like layers, and the place of this layer among them.
    - `h`: the residual stream, in whole chunks; not donated. Rows from `length` on mean nothing.
    - `length`: tokens of the sequence.
    - `start`: the first row that is wanted.
    - `chunk`: rows that are computed at a time; static.
    - `rows`: how many rows are wanted; static.

    Returns the wanted rows after the layer, and the rotated keys and values of all rows.
    """
    layer, length = Layer(take_layer(stack, place), config), jnp.asarray(length)
    stored = all_keys(layer, h, length, chunk)
    return _seeing_all(layer, h, stored, start, rows, length), stored


def reuse_layer(
    stack: Weights,
    place: Scalar,
    h: Hidden,
    stored: KeysValues,
    start: Scalar,
    length: Scalar,
    *,
    config: ModelConfig,
) -> tuple[Hidden, KeysValues, Array]:
    """One layer for a few rows that follow one another inside a sequence.

    Arguments:
    - `stack`, `place`: the weights of like layers, and the place of this layer among them.
    - `h`: the rows, whose first has the position `start`.
    - `stored`: keys and values of all rows, to be donated; those of `h` are replaced.
    - `length`: tokens of the sequence.

    Returns the rows after the layer, `stored`, and an array to wait for.
    """
    layer = Layer(take_layer(stack, place), config)
    h, stored = layer.apply(h, Within(stored, start, jnp.asarray(length)))
    return h, stored, h[0, :1]


def _seeing_all(
    layer: Layer, h: Hidden, stored: KeysValues, start: Scalar, rows: int, length: Array
) -> Hidden:
    """So many rows after the layer, from `start` on."""
    positions, rotation = at_positions(layer.config, start, rows)
    ranges = Rows(positions, jnp.zeros_like(positions), jnp.where(positions < length, length, 0))
    part = lax.dynamic_slice_in_dim(h, start, rows)
    return layer.apply(part, Ranges(ranges, rotation, attention, stored))[0]
