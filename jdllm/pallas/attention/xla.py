"""The portable form: an online softmax over key blocks, in any XLA backend."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jdllm.pallas.attention.limits import SCORE_TILE
from jdllm.pallas.attention.types import AttentionOutput, Bounds, Keys, Queries


def attention_xla(
    q: Queries, k: Keys, v: Keys, k_start: Bounds, k_end: Bounds, *, scale: float, block: int | None = None
) -> AttentionOutput:
    """Portable form of `jdllm.pallas.attention.attention`.

    Scores exist for `block` rows x `block` keys x heads at a time. Each block of rows visits only the key
    blocks that its rows' ranges touch, so that packed segments cost what they would cost alone. The last
    block of rows or keys is shifted back to end at the boundary: no operand is ever padded.

    Arguments:
    - `block`: by default what suits the platform.
    """
    if block is None:
        # A CPU gains nothing from large tiles, and packed short segments lose by them.
        small, large = (functools.partial(attention_xla, scale=scale, block=b) for b in (128, SCORE_TILE))
        return lax.platform_dependent(q, k, v, k_start, k_end, cpu=small, default=large)
    rows, heads, head_dim = q.shape
    keys, kv_heads, _ = k.shape
    row_block, key_block = min(block, rows), min(block, keys)
    group = heads // kv_heads

    def partial(start: Array) -> tuple[Array, Array, Array]:
        q_block = lax.dynamic_slice_in_dim(q, start, row_block).reshape(row_block, kv_heads, group, head_dim)
        first = lax.dynamic_slice_in_dim(k_start, start, row_block)
        last = lax.dynamic_slice_in_dim(k_end, start, row_block)
        seen = first < last
        lowest = jnp.min(jnp.where(seen, first, keys))
        highest = jnp.max(jnp.where(seen, last, 0))

        def visit(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            o, m, total = carry
            begin = index * key_block
            at = jnp.minimum(begin, keys - key_block)
            column = at + jnp.arange(key_block)
            visible = (column >= first[:, None]) & (column < last[:, None]) & (column >= begin)
            k_block = lax.dynamic_slice_in_dim(k, at, key_block)
            v_block = lax.dynamic_slice_in_dim(v, at, key_block)
            scores = scale * dot("qhgd,shd->hgqs", q_block, k_block)
            scores = jnp.where(visible, scores, -jnp.inf)
            new_m = jnp.maximum(m, scores.max(axis=-1))
            finite_m = jnp.where(jnp.isneginf(new_m), 0.0, new_m)
            p = jnp.exp(scores - finite_m[..., None])
            decay = jnp.exp(m - finite_m)
            o = o * decay[..., None] + dot("hgqs,shd->hgqd", p.astype(v.dtype), v_block)
            return o, new_m, total * decay + p.sum(axis=-1)

        shape = (kv_heads, group, row_block)
        empty = (jnp.zeros((*shape, head_dim)), jnp.full(shape, -jnp.inf), jnp.zeros(shape))
        o, m, total = lax.fori_loop(lowest // key_block, -(-highest // key_block), visit, empty)
        o = o / jnp.where(total == 0, 1.0, total)[..., None]
        by_row = jnp.moveaxis(o, 2, 0).reshape(row_block, heads, head_dim).astype(q.dtype)
        m, total = (jnp.moveaxis(x, 2, 0).reshape(row_block, heads) for x in (m, total))
        return by_row, m, total

    if row_block == rows:
        return AttentionOutput(*partial(jnp.int32(0)))

    def store(index: Array, out: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        start = jnp.minimum(index * row_block, rows - row_block)
        parts = partial(start)
        o, m, total = (
            lax.dynamic_update_slice_in_dim(x, part, start, 0) for x, part in zip(out, parts, strict=True)
        )
        return o, m, total

    m, total = (lax.empty((rows, heads), jnp.float32) for _ in range(2))
    out = (lax.empty(q.shape, q.dtype), m, total)
    return AttentionOutput(*lax.fori_loop(0, -(-rows // row_block), store, out))


def dot(spec: str, a: Array, b: Array) -> Float[Array, "..."]:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
