"""A matrix that is kept in few bits on the device."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

WeightForm = Literal["int8"]
"""Bits of a number, and its kind."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """A matrix, or matrices of many layers: row `o` is `values[o] * scales[o]`.

    - `values`: one row for each output, whose inputs are in the order of `out_of_order`.
    - `scales`: of each row.
    """

    values: Int8[Array, "*stack outputs inputs"]
    scales: Float32[Array, "*stack outputs"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @classmethod
    def of(cls, matrix: Float[Array, "*stack outputs inputs"]) -> "Quantised":
        """A matrix that is `rounded`."""
        values, scales = rounded(matrix)
        return cls(out_of_order(values), scales)

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*stack outputs inputs"]:
        """The matrix in a type that XLA's products take."""
        values = in_order(self.values).astype(jnp.float32)
        return (values * self.scales[..., None]).astype(dtype)


def rounded(
    matrix: Float[Array, "*stack outputs inputs"],
) -> tuple[Int8[Array, "*stack outputs inputs"], Float32[Array, "*stack outputs"]]:
    """Numbers of 8 bits, whose inputs are in order, and the scale of each row.

    They are rounded to nearest, so that the largest number of a row becomes 127 or -127.
    """
    matrix = matrix.astype(jnp.float32)
    scales = jnp.max(jnp.abs(matrix), axis=-1) / 127
    values = jnp.round(matrix / jnp.where(scales > 0, scales, 1)[..., None])
    return values.astype(jnp.int8), scales


def out_of_order(values: Int8[Array, "*stack inputs"]) -> Int8[Array, "*stack inputs"]:
    """Numbers in the order in which kernels load them (`jdllm.pallas.widening`).

    Each sixteen are 0, 8, 1, 9, 4, 12, 5, 13, 2, 10, 3, 11, 6, 14, 7, 15. Inputs that are no multiple of 16
    stay as they are: no kernel takes them.
    """
    return _permuted(values, (2, 1, 3, 0))


def in_order(values: Int8[Array, "*stack inputs"]) -> Int8[Array, "*stack inputs"]:
    """Undo `out_of_order`."""
    return _permuted(values, (3, 1, 0, 2))


def _permuted(values: Int8[Array, "*stack inputs"], bits: tuple[int, ...]) -> Int8[Array, "*stack inputs"]:
    """Permute the bits of a place among sixteen, the highest first."""
    *stack, inputs = values.shape
    if inputs % 16:
        return values
    before = len(stack) + 1
    by_bits = values.reshape(*stack, inputs // 16, 2, 2, 2, 2)
    return by_bits.transpose(*range(before), *(before + bit for bit in bits)).reshape(values.shape)
