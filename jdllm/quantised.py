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

    - `values`: one row for each output.
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
        """A matrix rounded to nearest, so that the largest number of a row becomes 127 or -127."""
        matrix = matrix.astype(jnp.float32)
        scales = jnp.max(jnp.abs(matrix), axis=-1) / 127
        values = jnp.round(matrix / jnp.where(scales > 0, scales, 1)[..., None])
        return cls(values.astype(jnp.int8), scales)

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*stack outputs inputs"]:
        """The matrix in a type that XLA's products take."""
        return (self.values.astype(jnp.float32) * self.scales[..., None]).astype(dtype)
