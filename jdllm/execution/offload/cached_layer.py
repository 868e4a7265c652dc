"""The executables of a sequence with a cache that runs layer by layer, its keys too large for the device.

A layer is one executable. A refresh computes the keys and values of all rows in chunks, and then the rows in
chunks, each of which sees all keys. It keeps all keys and values, or those that a selection chooses. A reuse
computes a few rows in the middle of the sequence. Where all are kept, their keys and values take the place of
older ones; otherwise they see what is kept, and each other.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jdllm.execution.offload.layered import all_keys, at_positions, chunks_of, placed
from jdllm.execution.offload.parts import Scalar, take_layer
from jdllm.execution.paged.selection import Selection, candidate_order
from jdllm.models.block import Hidden, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Heads, KeysValues, Layer, Ranges, Weights
from jdllm.models.rotary import rotation_at
from jdllm.pallas.attention import attention, merge


class Keeping(NamedTuple):
    """How the rows that a layer keeps are chosen.

    - `rows`: of the arrays for what is kept.
    - `usual`: of `jdllm.execution.paged.selection.candidate_order`.
    """

    rows: int
    usual: bool


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


class Beside(NamedTuple):
    """Rows that follow one another inside a sequence of whose other rows some are stored: a `Sees`. They see
    what is stored, and each other.

    - `stored`: keys and values that a layer has kept.
    - `start`: the position of the first row.
    - `kept`: how many rows of `stored` are seen.
    """

    stored: KeysValues
    start: Scalar
    kept: Scalar

    def attend(self, layer: Layer, h: Hidden) -> tuple[Heads, KeysValues]:
        _, rotation = at_positions(layer.config, self.start, h.shape[0])
        k, v, q = layer.project(h, rotation, ("k", "v", "q"))
        first, scale = jnp.zeros(h.shape[0], jnp.int32), layer.config.attention_scale
        before = attention(q, *self.stored, first, first + self.kept, scale=scale)
        own = attention(q, k, v, first, first + h.shape[0], scale=scale)
        return merge([before, own]).o, self.stored


def refresh_layer(
    stack: Weights,
    place: Scalar,
    h: Hidden,
    length: Scalar,
    selection: Selection | None = None,
    *,
    config: ModelConfig,
    chunk: int,
    keeping: Keeping | None = None,
) -> tuple[Hidden, KeysValues, Array]:
    """One layer over all rows of a sequence, each of which sees all of them.

    Arguments:
    - `stack`, `place`: the weights of like layers, and the place of this layer among them.
    - `h`: the residual stream, in whole chunks, to be donated. Rows from `length` on mean nothing.
    - `length`: tokens of the sequence.
    - `selection`: which rows are kept, of one segment; `None` for all.
    - `chunk`: rows that are computed at a time; static.
    - `keeping`: how rows are chosen, with a `selection`; static.

    Returns the rows after the layer, the rotated keys and values that it keeps, and an array to wait for.
    """
    layer, length = Layer(take_layer(stack, place), config), jnp.asarray(length)
    stored = all_keys(layer, h, length, chunk)
    kept = _kept(layer, h, stored, selection, keeping)

    def update(index: Array, h: Hidden) -> Hidden:
        rows = _seeing_all(layer, h, stored, index * chunk, chunk, length)
        return lax.dynamic_update_slice_in_dim(h, rows, index * chunk, 0)

    h = lax.fori_loop(0, chunks_of(length, chunk), update, h)
    return h, kept, h[0, :1]


def last_refresh_layer(
    stack: Weights,
    place: Scalar,
    h: Hidden,
    length: Scalar,
    start: Scalar,
    selection: Selection | None = None,
    *,
    config: ModelConfig,
    chunk: int,
    rows: int,
    keeping: Keeping | None = None,
) -> tuple[Hidden, KeysValues]:
    """The last layer of a refresh, of which only a few rows are wanted: others get keys and values only.

    Arguments:
    - `stack`, `place`: the weights of like layers, and the place of this layer among them.
    - `h`: the residual stream, in whole chunks; not donated. Rows from `length` on mean nothing.
    - `length`: tokens of the sequence.
    - `start`: the first row that is wanted.
    - `chunk`: rows that are computed at a time; static.
    - `rows`: how many rows are wanted; static.
    - `selection`, `keeping`: as for other layers.

    Returns the wanted rows after the layer, and the rotated keys and values that it keeps.
    """
    layer, length = Layer(take_layer(stack, place), config), jnp.asarray(length)
    stored = all_keys(layer, h, length, chunk)
    kept = _kept(layer, h, stored, selection, keeping)
    return _seeing_all(layer, h, stored, start, rows, length), kept


def reuse_layer(
    stack: Weights,
    place: Scalar,
    h: Hidden,
    stored: KeysValues,
    start: Scalar,
    length: Scalar,
    kept: Scalar | None = None,
    *,
    config: ModelConfig,
) -> tuple[Hidden, KeysValues, Array]:
    """One layer for a few rows that follow one another inside a sequence.

    Arguments:
    - `stack`, `place`: the weights of like layers, and the place of this layer among them.
    - `h`: the rows, whose first has the position `start`.
    - `stored`: keys and values of all rows, to be donated; those of `h` are replaced. Or those of the rows
      that the layer keeps, which stay as they are.
    - `length`: tokens of the sequence.
    - `kept`: how many rows are stored, where not all are.

    Returns the rows after the layer, `stored`, and an array to wait for.
    """
    layer = Layer(take_layer(stack, place), config)
    if kept is None:
        h, stored = layer.apply(h, Within(stored, start, jnp.asarray(length)))
    else:
        h, stored = layer.apply(h, Beside(stored, start, jnp.asarray(kept)))
    return h, stored, h[0, :1]


def _kept(
    layer: Layer, h: Hidden, stored: KeysValues, selection: Selection | None, keeping: Keeping | None
) -> KeysValues:
    """What a layer keeps of all keys and values, in the order of their worth.

    Arguments:
    - `h`: the rows before the layer.
    - `stored`: rotated keys, and values, of all rows.
    """
    if selection is None or keeping is None:
        return stored

    def queries(rows: Int[Array, " some"]) -> Heads:
        rotation = rotation_at(layer.config.rope, layer.config.head_dim, rows)
        return layer.project(h[rows], rotation, ("q",))[0]

    order = candidate_order(queries, stored[0], selection, usual=keeping.usual)
    place = jnp.minimum(jnp.arange(keeping.rows), jnp.asarray(selection.keep)[0] - 1)
    source, head = jnp.asarray(selection.row)[order[:, place]].T, jnp.arange(stored[0].shape[1])
    k, v = (x.at[source, head].get(mode="promise_in_bounds") for x in stored)
    return k, v


def _seeing_all(
    layer: Layer, h: Hidden, stored: KeysValues, start: Scalar, rows: int, length: Array
) -> Hidden:
    """So many rows after the layer, from `start` on."""
    positions, rotation = at_positions(layer.config, start, rows)
    ranges = Rows(positions, jnp.zeros_like(positions), jnp.where(positions < length, length, 0))
    part = lax.dynamic_slice_in_dim(h, start, rows)
    return layer.apply(part, Ranges(ranges, rotation, attention, stored))[0]
