"""Keys or values that are stored: plain arrays, or floats of 8 bits with a scale for each row and head.

Stored rows are written and read here, whatever their form.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float, Float8e4m3fn, Float32

from jdllm.quantised import FLOAT8, MOST_FLOAT8

KvCacheDtype = Literal["auto", "fp8"]
"""How keys and values are stored: in the type of the model (auto), or as `Float8Rows` (fp8)."""

_LEAST_SCALE = 2.0**-100


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Float8Rows:
    """Rows of heads in floats of 8 bits: a head of a row is `values * scale`.

    A scale is a power of two. So a product with a scale is exact in float32 and in bfloat16, whoever computes
    it, and in float16 where the product is not too small for this type. The scales cost no accuracy: a
    product with a power of two changes only the exponents of floats.

    - `values`: with the head dimension last.
    - `scales`: of each head of each row.
    """

    values: Float8e4m3fn[Array, "*rows head_dim"]
    scales: BFloat16[Array, "*rows"]

    @classmethod
    def of(cls, rows: Float[Array, "*rows head_dim"]) -> "Float8Rows":
        """Rows that are rounded to nearest, so that no number is larger than 448.

        The numbers of a head of a row depend on this head of this row alone. Rows that are rounded already
        stay as they are.
        """
        rows = rows.astype(jnp.float32)
        scales = _power_of_two(jnp.max(jnp.abs(rows), axis=-1) / MOST_FLOAT8)
        return cls((rows / scales[..., None]).astype(FLOAT8), scales.astype(jnp.bfloat16))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    def wide(self, dtype: jnp.dtype) -> Float[Array, "*rows head_dim"]:
        """The rows in a type that products take."""
        wide = self.values.astype(jnp.float32) * self.scales.astype(jnp.float32)[..., None]
        return wide.astype(dtype)


def as_stored(pool: Array | Float8Rows, rows: Float[Array, "*rows head_dim"]) -> Array | Float8Rows:
    """Rows in the form in which a pool of keys or values stores them."""
    return Float8Rows.of(rows) if isinstance(pool, Float8Rows) else rows.astype(pool.dtype)


def as_read(
    pool: Array | Float8Rows,
    rows: Float[Array, "*rows head_dim"],
    stored: Bool[Array, "*rows"] | None = None,
) -> Float[Array, "*rows head_dim"]:
    """Rows as they will be read from a pool of keys or values, in their own type.

    Rows see what is stored in the same evaluation by this: else what they see would depend on how rows are
    dealt out to evaluations.

    Arguments:
    - `pool`: which stores the rows.
    - `stored`: which rows are stored; the others stay as they are. `None` for all.
    """
    if not isinstance(pool, Float8Rows):
        return rows
    read = Float8Rows.of(rows).wide(rows.dtype)
    return read if stored is None else jnp.where(stored[..., None], read, rows)


def rows_at(pool: Array | Float8Rows, index: Any, dtype: jnp.dtype) -> Float[Array, "*rows head_dim"]:
    """The rows of a pool at an index that has the head dimension whole: in `dtype` where they are stored in
    8 bits."""
    found = jax.tree.map(lambda part: part[index], pool)
    return found.wide(dtype) if isinstance(found, Float8Rows) else found


def _power_of_two(x: Float32[Array, "*rows"]) -> Float32[Array, "*rows"]:
    """The least power of two that is no smaller, at least 2^-100; NaN for infinity and NaN."""
    x = jnp.maximum(x, _LEAST_SCALE)
    # No function of the library promises an exact power of two; a float without its mantissa is one.
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x7FFFFF)
    return jnp.where(
        jnp.isfinite(x), lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32), jnp.nan
    )
