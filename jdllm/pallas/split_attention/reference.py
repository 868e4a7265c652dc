"""Split-S attention with every page gathered and the whole score matrix in memory: the oracle."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jdllm.pallas.attention.types import AttentionOutput
from jdllm.pallas.split_attention.types import Fresh, PageTable, Pool, Queries, gathered


def split_attention_reference(
    q: Queries,
    k_pool: Pool,
    v_pool: Pool,
    table: PageTable,
    *,
    fresh: tuple[Fresh, Fresh] | None,
    fresh_unit: int,
    layer: Int[Array, ""] | int,
    scale: float,
) -> AttentionOutput:
    """Dense form of `jdllm.pallas.split_attention.split_attention`; memory grows with requests x all keys."""
    _, _, kv_heads, page_rows, head_dim = k_pool.shape
    requests, queries, heads, _ = q.shape
    pages, valid, first = (jnp.asarray(x) for x in table)
    entry = jnp.arange(pages.shape[0])
    owned = (entry >= first[:-1, None]) & (entry < first[1:, None])
    live = jnp.arange(page_rows) < valid[:, None]
    seen = (owned[:, :, None] & live).reshape(requests, -1)

    def gather(pool: Pool, fresh: Fresh | None) -> Array:
        rows = jnp.moveaxis(gathered(pool, fresh, layer, pages, fresh_unit, jnp.float32), 1, 0)
        return jnp.where(live.reshape(-1, 1), rows.reshape(kv_heads, -1, head_dim).astype(jnp.float32), 0)

    k, v = map(gather, (k_pool, v_pool), fresh or (None, None))
    grouped = q.reshape(requests, queries, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    scores = scale * jnp.einsum("rqhgd,hsd->rqhgs", grouped, k, precision=lax.Precision.HIGHEST)
    scores = jnp.where(seen[:, None, None, None, :], scores, -jnp.inf)
    m = scores.max(axis=-1, initial=-jnp.inf)
    p = jnp.exp(scores - jnp.where(jnp.isneginf(m), 0.0, m)[..., None])
    total = p.sum(axis=-1)
    o = jnp.einsum("rqhgs,hsd->rqhgd", p, v, precision=lax.Precision.HIGHEST)
    o = (o / jnp.where(total == 0, 1.0, total)[..., None]).reshape(q.shape)
    m, total = (x.reshape(requests, queries, heads) for x in (m, total))
    return AttentionOutput(o.astype(q.dtype), m, total)
