"""The portable form: an online softmax over runs of pages, in any XLA backend."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jdllm.pallas.attention.types import AttentionOutput
from jdllm.pallas.attention.xla import dot
from jdllm.pallas.split_attention.types import FRESH_UNIT, Fresh, PageTable, Pool, Queries, gathered

Carry = tuple[Array, Array, Array]


def split_attention_xla(
    q: Queries,
    k_pool: Pool,
    v_pool: Pool,
    table: PageTable,
    fresh: tuple[Fresh, Fresh] | None = None,
    *,
    fresh_unit: int = FRESH_UNIT,
    layer: Int[Array, ""] | int,
    scale: float,
    keys: int | None = None,
) -> AttentionOutput:
    """Portable form of `jdllm.pallas.split_attention.split_attention`.

    One request after another takes the pages of about `keys` keys at a time: only their keys, values and
    scores exist.

    Arguments:
    - `keys`: by default what suits the platform.
    """
    if keys is None:
        # Few keys at a time suit the caches of a CPU; a GPU needs many to be busy.
        small, large = (
            functools.partial(split_attention_xla, fresh_unit=fresh_unit, layer=layer, scale=scale, keys=keys)
            for keys in (512, 4096)
        )
        return lax.platform_dependent(q, k_pool, v_pool, table, fresh, cpu=small, default=large)
    _, _, kv_heads, page_rows, head_dim = k_pool.shape
    requests, queries, heads, _ = q.shape
    group = heads // kv_heads
    pages, valid, first = (jnp.asarray(x) for x in table)
    k_fresh, v_fresh = fresh or (None, None)
    run = max(keys // page_rows, 1)
    layer = jnp.asarray(layer, jnp.int32)

    def rows_of(pool: Pool, fresh: Fresh | None, entries: Array) -> Array:
        return gathered(pool, fresh, layer, entries, fresh_unit, q.dtype)

    def attend(request: Array) -> Carry:
        query = lax.dynamic_index_in_dim(q, request, keepdims=False)
        query = query.reshape(queries, kv_heads, group, head_dim)
        begin, end = first[request], first[request + 1]

        def visit(index: Array, carry: Carry) -> Carry:
            o, m, total = carry
            entry = begin + index * run + jnp.arange(run)
            at = jnp.minimum(entry, end - 1)
            live = jnp.arange(page_rows) < jnp.where(entry < end, valid[at], 0)[:, None]
            # Rows that are not live may hold anything, and 0 times infinity is no number.
            v = jnp.where(live[:, None, :, None], rows_of(v_pool, v_fresh, pages[at]), 0)
            scores = scale * dot("qhgd,phsd->hgqps", query, rows_of(k_pool, k_fresh, pages[at]))
            scores = jnp.where(live, scores, -jnp.inf)
            new_m = jnp.maximum(m, scores.max(axis=(-2, -1)))
            finite_m = jnp.where(jnp.isneginf(new_m), 0.0, new_m)
            p = jnp.exp(scores - finite_m[..., None, None])
            decay = jnp.exp(m - finite_m)
            o = o * decay[..., None] + dot("hgqps,phsd->hgqd", p.astype(v.dtype), v)
            return o, new_m, total * decay + p.sum(axis=(-2, -1))

        shape = (kv_heads, group, queries)
        empty = (jnp.zeros((*shape, head_dim)), jnp.full(shape, -jnp.inf), jnp.zeros(shape))
        o, m, total = lax.fori_loop(0, -(-(end - begin) // run), visit, empty)
        o = o / jnp.where(total == 0, 1.0, total)[..., None]
        by_query = jnp.moveaxis(o, 2, 0).reshape(queries, heads, head_dim).astype(q.dtype)
        m, total = (jnp.moveaxis(x, 2, 0).reshape(queries, heads) for x in (m, total))
        return by_query, m, total

    return AttentionOutput(*lax.map(attend, jnp.arange(requests)))
