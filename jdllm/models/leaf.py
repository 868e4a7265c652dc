"""What a weight is: the one place that multiplies with weights, looks up their rows and counts their bytes.

A weight is a plain array, `[outputs, inputs]`. A weight that is kept in another form is another type
(`VocabularyPart`, `Quantised`, `InStack`), and these functions tell the types apart.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor
from jdllm.errors import ConfigError
from jdllm.layers import head_logits, linear
from jdllm.models.cards import AXIS, joined, rows_of_part
from jdllm.pallas.quantised_matmul import quantised_matmul
from jdllm.quantised import Quantised

Device = Any
"""A `jax.Device`, which has no static type."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VocabularyPart:
    """A matrix with a row for each id, of which every card has as many (`jdllm.models.cards`).

    - `weight`: `[padded_vocab, hidden]`, zeros behind the last id; on a card, inside a step, the part of this
      card.
    - `ids`: how many ids there are.
    """

    weight: Float[Array, "padded_vocab hidden"]
    ids: int = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype


class InStack(NamedTuple):
    """A layer's matrix in few bits, where the matrix lies in the stack of all layers: a kernel that was given
    a slice would be given a copy."""

    stack: Quantised
    place: Int[Array, ""] | int


class Dtypes(NamedTuple):
    """Types of a model's numbers: its matrices, its hidden rows, and the keys and values that it stores."""

    weights: jnp.dtype
    activations: jnp.dtype
    pool: jnp.dtype


def dtypes_of(params: dict[str, Any]) -> Dtypes:
    """The types of a model, by its weights."""
    activations = params["final_norm"].dtype
    return Dtypes(params["embed"].dtype, activations, activations)


def device_of(params: dict[str, Any]) -> Device:
    """The device that holds a model. Raises `ConfigError` for a model on several devices."""
    devices = params["final_norm"].devices()
    if len(devices) > 1:
        raise ConfigError(f"the weights lie on {len(devices)} devices, and LLM runs on one: load them there")
    return next(iter(devices))


def of_layer(stack: Float[Array, "layers ..."] | Quantised, place: Int[Array, ""] | int) -> Array | InStack:
    """The weight of the layer at a place of a stack."""
    if isinstance(stack, Quantised):
        return InStack(stack, place)
    return lax.dynamic_index_in_dim(stack, place, keepdims=False)


def matmul(
    x: Float[Array, "rows i"],
    weight: Float[Array, "o i"] | Quantised | InStack,
    bias: Float[Array, " o"] | None = None,
) -> Float[Array, "rows o"]:
    """Products of rows with a weight, in the dtype of the rows."""
    if isinstance(weight, InStack):
        y = quantised_matmul(x, weight.stack, layer=weight.place)
        return y if bias is None else y + bias
    return linear(x, weight, bias)


def some_outputs(
    weight: Float[Array, "o i"] | Quantised | InStack, start: Int[Array, ""] | int, size: int
) -> Float[Array, "size i"] | Quantised:
    """`size` neighbouring outputs of a weight, from `start` on."""
    if isinstance(weight, InStack):
        return weight.stack.of_layer(weight.place).some_outputs(start, size)
    if isinstance(weight, Quantised):
        return weight.some_outputs(start, size)
    return lax.dynamic_slice_in_dim(weight, start, size)


def logits(x: Float[Array, "rows d"], weight: Float[Array, "o d"] | VocabularyPart) -> Float[Array, "rows o"]:
    """Products of rows with a weight in f32, for the head and for routers."""
    if isinstance(weight, VocabularyPart):
        return joined(head_logits(x, weight.weight), lax.axis_size(AXIS), axis=1)[:, : weight.ids]
    return head_logits(x, weight)


def rows(weight: Float[Tensor, "o i"] | VocabularyPart, ids: Int[Tensor, " rows"]) -> Float[Array, "rows i"]:
    """Some rows of a weight; NumPy rows of a weight that is a NumPy array."""
    return rows_of_part(weight.weight, ids) if isinstance(weight, VocabularyPart) else weight[ids]


def nbytes(weight: Array | Quantised | jax.ShapeDtypeStruct) -> int:
    """Bytes of a weight, which may be abstract."""
    return sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(weight))
