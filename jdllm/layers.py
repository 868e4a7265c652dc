"""The primitives of the transformer."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jdllm.quantised import Float8, Quantised


def rms_norm(x: Float[Array, "*rows d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*rows d"]:
    """Root-mean-square norm: normalised in f32, cast to the dtype of `x`, then multiplied by the weight.

    The order matters in low precision; the published models have the same order.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def linear(
    x: Float[Array, "rows i"], weight: Float[Array, "o i"] | Quantised, bias: Float[Array, " o"] | None = None
) -> Float[Array, "rows o"]:
    """x @ weight.T + bias in the dtype of `x`, with full f32 products where that is f32.

    Rows of 16 bits are rounded where the weight has floats of 8 bits.
    """
    if isinstance(weight, Float8) and x.dtype != jnp.float32:
        y = weight.product(x)
        return y if bias is None else y + bias
    if isinstance(weight, Quantised):
        # Widening waits for the rows: else all matrices of a layer would be wide at once.
        scales, x = lax.optimization_barrier((weight.scales, x))
        weight = dataclasses.replace(weight, scales=scales).dequantised(x.dtype)
    y = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    # A product that adds the bias itself cannot read a layer's weights in their stack: XLA would copy them.
    return y if bias is None else lax.optimization_barrier(y) + bias


def head_logits(x: Float[Array, "rows d"], head: Float[Array, "vocab d"]) -> Float[Array, "rows vocab"]:
    """Logits in f32, accumulated and kept in f32 whatever the dtype of the operands."""
    return lax.dot_general(
        x,
        head,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def rotate(
    x: Float[Array, "rows heads head_dim"],
    cos: Float32[Array, "rows pairs"],
    sin: Float32[Array, "rows pairs"],
) -> Float[Array, "rows heads head_dim"]:
    """Rotate queries or keys, in f32, cast back to the dtype of `x`.

    Dimension i is paired with i + pairs (the rotate-half convention); dimensions from 2 pairs on pass
    unchanged.
    """
    pairs = cos.shape[-1]
    a, b = (x[..., part].astype(jnp.float32) for part in (slice(pairs), slice(pairs, 2 * pairs)))
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*rotated, x[..., 2 * pairs :]], axis=-1)
