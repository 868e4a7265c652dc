"""Gumbel noise from multiplications, additions and bit operations, for a kernel with fast approximations.

The same draws as `jdllm.noise.gumbel`; the two differ by rounding, at most 2 units in the last
place of max(1, |noise|).
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

# log(1 + r) = r + r^2 q(r) for |r| <= 1/3 with a relative error of 2.6e-8: a polynomial of degree 7, fitted
# for the smallest relative error.
COEFFICIENTS = (
    -0.49999937,
    0.33333197,
    -0.25007824,
    0.20011169,
    -0.16415961,
    0.13995807,
    -0.1538854,
    0.14026364,
)
TWO_THIRDS = 0x3F2AAAAB  # the bits of 2/3
EXPONENT_ONE = 1 << 23  # the bits of an exponent of 1


def gumbel(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Standard Gumbel noise, f32, from u = (b + 1/2) / 2^32."""
    upper = bits >= jnp.uint32(1 << 31)
    near = jnp.where(upper, ~bits, bits)
    fraction = near.astype(jnp.float32) * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
    r, exponent = _reduced(fraction)
    # In the upper half u is 1 - fraction.
    far = fraction > jnp.float32(1 / 3)
    r = jnp.where(upper, jnp.where(far, 1 - 2 * fraction, -fraction), r)
    exponent = jnp.where(upper, jnp.where(far, -float(EXPONENT_ONE), 0.0), exponent)
    return -_log(*_reduced(-_log(r, exponent)))


def _reduced(x: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """(r, 2^23 e) with x = (1 + r) 2^e and |r| <= 1/3, for positive normal x."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - TWO_THIRDS) & -EXPONENT_ONE
    mantissa = lax.bitcast_convert_type(bits - exponent, jnp.float32)
    return mantissa - 1, exponent.astype(jnp.float32)


def _log(r: Float[Array, "*shape"], exponent: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """log((1 + r) 2^e) for what `_reduced` returns."""
    q = jnp.float32(COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        q = q * r + jnp.float32(coefficient)
    return exponent * jnp.float32(math.log(2) / EXPONENT_ONE) + (r * r * q + r)
