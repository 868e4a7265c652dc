"""Keys and values of one layer out of the pages that hold them, for rows that see ranges of them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jdllm.arrays import Tensor
from jdllm.execution.paged.pool import KvArrays
from jdllm.models.block import RowInts
from jdllm.models.layer import Heads, KeysValues, LayerNumber
from jdllm.pallas.attention import AttentionOutput, attention, merge, nothing_seen
from jdllm.stored_rows import rows_at

GATHERED_KEYS = 16384
"""Keys that exist beside the pool at a time."""


class StoredKeys(NamedTuple):
    """Pages whose rows, one page after another, are what ranges of rows refer to.

    - `pages`: int32; any page where nothing is live.
    - `valid`: int32, how many rows of each are live, from its first on.
    """

    pages: Int[Tensor, " entries"]
    valid: Int[Tensor, " entries"]


def gathered_keys(keys: StoredKeys, pool: KvArrays, number: LayerNumber, dtype: jnp.dtype) -> KeysValues:
    """The rows of some pages of one layer; values that are not live are zero, whatever was there.

    Arguments:
    - `dtype`: the type in which rows are returned that are stored in 8 bits.
    """
    pages = jnp.asarray(keys.pages)
    live = jnp.arange(pool.k.shape[3]) < jnp.asarray(keys.valid)[:, None]
    stored_k, stored_v = (rows_at(half, (number, pages), dtype) for half in pool)
    by_page = stored_k, jnp.where(live[:, None, :, None], stored_v, 0)
    k, v = (jnp.moveaxis(x, 1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in by_page)
    return k, v


def over_stored_keys(
    q: Heads,
    start: RowInts,
    end: RowInts,
    keys: StoredKeys,
    pool: KvArrays,
    number: LayerNumber,
    scale: float,
) -> AttentionOutput:
    """Attention of rotated queries over ranges of stored rows, `GATHERED_KEYS` at a time.

    Arguments:
    - `start`, `end`: the range of each query, of rows of `keys`.
    - `number`: of the layer.
    """
    page_rows = pool.k.shape[3]
    at_once = GATHERED_KEYS // page_rows
    start, end = jnp.asarray(start), jnp.asarray(end)
    if len(keys.pages) <= at_once:
        return AttentionOutput(
            *attention(q, *gathered_keys(keys, pool, number, q.dtype), start, end, scale=scale)
        )
    missing = -len(keys.pages) % at_once
    pages, valid = (jnp.pad(jnp.asarray(x), (0, missing)).reshape(-1, at_once) for x in keys)

    def turn(index: Array, before: AttentionOutput) -> AttentionOutput:
        part = gathered_keys(StoredKeys(pages[index], valid[index]), pool, number, q.dtype)
        bounds = (jnp.clip(x - index * GATHERED_KEYS, 0, GATHERED_KEYS) for x in (start, end))
        found = AttentionOutput(*attention(q, *part, *bounds, scale=scale))
        return merge([before, found])

    turns = -(-end.max() // GATHERED_KEYS)
    found = lax.fori_loop(0, jnp.minimum(turns, len(pages)), turn, nothing_seen(q))
    return found._replace(o=found.o.astype(q.dtype))


def gathering_bytes(rows: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes that `over_stored_keys` needs beside its queries and its result, for so many rows."""
    keys = GATHERED_KEYS * kv_heads * head_dim * itemsize
    return 4 * keys + 2 * rows * heads * head_dim * 4
