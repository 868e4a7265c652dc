"""A matrix that is kept in 8 bits on the device."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8


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

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*stack outputs inputs"]:
        """The matrix in a type that XLA's products take."""
        return (self.values.astype(jnp.float32) * self.scales[..., None]).astype(dtype)
