"""Attention with the whole score matrix in memory: the oracle of the other forms."""

import jax.numpy as jnp
from jax import lax

from jdllm.pallas.attention.types import AttentionOutput, Bounds, Keys, Queries


def attention_reference(
    q: Queries, k: Keys, v: Keys, k_start: Bounds, k_end: Bounds, *, scale: float
) -> AttentionOutput:
    """Dense form of `jdllm.pallas.attention.attention`; memory grows with rows x keys x heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = scale * jnp.einsum(
        "qhd,shd->qhs", q, k, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    column = jnp.arange(k.shape[0])
    visible = (column >= k_start[:, None]) & (column < k_end[:, None])
    scores = jnp.where(visible[:, None, :], scores, -jnp.inf)
    m = scores.max(axis=-1)
    p = jnp.exp(scores - jnp.where(jnp.isneginf(m), 0.0, m)[..., None])
    total = p.sum(axis=-1)
    o = jnp.einsum("qhs,shd->qhd", p, v.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    o = o / jnp.where(total == 0, 1.0, total)[..., None]
    return AttentionOutput(o.astype(q.dtype), m, total)
