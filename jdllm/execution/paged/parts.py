"""The transformer over parts of sequences.

Rows see each other by their ranges, and what is stored of others. Their own keys and values are stored too,
at other positions where asked.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jdllm.arrays import Tensor
from jdllm.execution.paged.pool import KeyValuePool
from jdllm.execution.paged.stored_keys import Heads, StoredKeys, over_stored_keys
from jdllm.execution.transformer import Wanted, attention_over, embed, scan_layers
from jdllm.layers import linear, rotate
from jdllm.models.block import Hidden, Layer, RowInts, Rows, ffn_branch, project_unrotated
from jdllm.models.config import ModelConfig
from jdllm.models.rotary import cos_sin
from jdllm.models.weights import Params
from jdllm.pallas.attention import AttentionOutput, merge
from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.pallas.split_attention import PageTable, split_attention


class Storage(NamedTuple):
    """Which rows are stored, and where.

    - `page`: the page that each entry fills; beyond any pool, and no two the same, where it is none.
    - `source`: the packed row of each slot, with one layer for all, or one head, where they are the same.
    - `positions`: those that the stored keys are rotated to, whatever they have among the packed rows.
    """

    page: Int[Tensor, " entries"]
    source: Int[Tensor, "#layers entries #kv_heads page_rows"]
    positions: Int[Tensor, "entries page_rows"]


class Parts(NamedTuple):
    """Packed rows, and what they see beside each other.

    - `tokens`, `rows`: as of `jdllm.execution.transformer.forward`. With `keys` their ranges are of its rows.
    - `keys`: the keys that ranges refer to, read after `storage` was written; `None` for those of the rows.
    - `own`: rows that see their own key beside their range, which it is no part of; `None` where none does.
    - `table`: the pages that each tile of rows sees, of as many tiles as it has requests; `None` where
      nothing is read.
    - `storage`: what is stored; `None` where nothing is.
    - `wanted`: the rows whose hidden states are wanted.
    """

    tokens: RowInts
    rows: Rows
    own: Bool[Tensor, " rows"] | None
    table: PageTable | None
    storage: Storage | None
    wanted: Wanted
    keys: StoredKeys | None = None


def forward_parts(
    params: Params, config: ModelConfig, parts: Parts, pool: KeyValuePool | None
) -> tuple[Hidden, KeyValuePool | None]:
    """Run all layers.

    Arguments:
    - `params`, `config`: as of `jdllm.execution.transformer.forward`.
    - `parts`: the rows.
    - `pool`: what is stored already, and what is written where there is storage: donate it then. `None` where
      nothing is read or stored.

    Returns the hidden rows that are wanted, in their order, and the pool.
    """
    rotation = cos_sin(config.rope, config.head_dim, parts.rows.positions)
    everywhere, scale = attention_over(parts.rows), config.head_dim**-0.5
    few_rows = None if parts.table is None else len(parts.tokens)

    def body(carry: tuple[Hidden, KeyValuePool | None], layer: Layer, number: Array):
        h, pool = carry
        q, k, v = project_unrotated(layer, config, h, ("q", "k", "v"))
        pool = _store(config, parts.storage, pool, number, k, v)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        bounds = parts.rows.k_start, parts.rows.k_end
        if parts.keys is not None and pool is not None:
            found = [over_stored_keys(q, *bounds, parts.keys, pool, number, scale)]
        else:
            found = [everywhere(q, k, v, *bounds, scale=scale)]
        if parts.own is not None:
            found.append(_of_itself(q, k, v, parts.own, scale))
        if parts.table is not None and pool is not None:
            found.append(_of_stored(q, pool, parts.table, number, scale))
        return _finished(layer, config, h, found), pool

    def last(carry: tuple[Hidden, KeyValuePool | None], layer: Layer, number: Array):
        h, pool = carry
        k, v = project_unrotated(layer, config, h, ("k", "v"))
        pool = _store(config, parts.storage, pool, number, k, v)
        (rows, live), k = parts.wanted, rotate(k, *rotation)
        (q,) = project_unrotated(layer, config, h[rows], ("q",))
        q = rotate(q, *(x[rows] for x in rotation))
        start, end = (jnp.asarray(x)[rows] for x in parts.rows[1:])
        end = jnp.where(live, end, start)
        seen = Rows(jnp.asarray(parts.rows.positions)[rows], start, end)
        if parts.keys is not None and pool is not None:
            found = [over_stored_keys(q, start, end, parts.keys, pool, number, scale)]
        else:
            found = [attention_over(seen, k.shape[0])(q, k, v, start, end, scale=scale)]
        if parts.own is not None:
            own = jnp.asarray(parts.own)[rows] & live
            found.append(_of_itself(q, k[rows], v[rows], own, scale))
        return _finished(layer, config, h[rows], found), pool

    carry = embed(params, jnp.asarray(parts.tokens)), pool
    if parts.table is None:
        return scan_layers(params, config, carry, body, last=last)
    # Tiles see pages together: the rows that are wanted are no tiles.
    h, pool = scan_layers(params, config, carry, body, few_rows=few_rows)
    return h[parts.wanted.rows], pool


def _finished(layer: Layer, config: ModelConfig, h: Hidden, found: list[Any]) -> Hidden:
    parts = [AttentionOutput(*part) for part in found]
    o = (parts[0] if len(parts) == 1 else merge(parts)).o
    h = h + linear(o.reshape(h.shape[0], -1), layer["o"])
    return h + ffn_branch(layer, config, h, grouped_matmul)


def _of_stored(
    q: Heads, pool: KeyValuePool, table: PageTable, number: Array, scale: float
) -> AttentionOutput:
    tiles = len(table.first) - 1
    by_tile = q.reshape(tiles, -1, *q.shape[1:])
    found = split_attention(by_tile, *pool, table, layer=number, scale=scale)
    return AttentionOutput(*(x.reshape(q.shape[0], *x.shape[2:]) for x in found))


def _of_itself(q: Heads, k: Heads, v: Heads, own: Bool[Tensor, " rows"], scale: float) -> AttentionOutput:
    """Attention of each row of `own` over its own key alone."""
    group = q.shape[1] // k.shape[1]
    own = jnp.asarray(own)[:, None]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    score = scale * (q.astype(jnp.float32) * k.astype(jnp.float32)).sum(axis=-1)
    return AttentionOutput(
        jnp.where(own[..., None], v, 0).astype(q.dtype),
        jnp.where(own, score, -jnp.inf),
        jnp.broadcast_to(own.astype(jnp.float32), score.shape),
    )


def _store(
    config: ModelConfig,
    storage: Storage | None,
    pool: KeyValuePool | None,
    number: Int[Array, ""],
    k: Heads,
    v: Heads,
) -> KeyValuePool | None:
    """Write unrotated keys and values of one layer into whole pages, rotated to their new positions."""
    if storage is None or pool is None:
        return pool
    layers = storage.source.shape[0]
    source = lax.dynamic_index_in_dim(
        jnp.asarray(storage.source), jnp.minimum(number, layers - 1), keepdims=False
    )
    head = jnp.arange(k.shape[1])[:, None]
    k, v = (x.at[source, head].get(mode="promise_in_bounds") for x in (k, v))
    cos, sin = cos_sin(config.rope, config.head_dim, jnp.asarray(storage.positions).reshape(-1))
    by_slot = jnp.moveaxis(k, 1, 2).reshape(cos.shape[0], k.shape[1], k.shape[3])
    rotated = rotate(by_slot, cos, sin).reshape(k.shape[0], k.shape[2], k.shape[1], k.shape[3])
    k = jnp.moveaxis(rotated, 2, 1)
    # Only a scatter of unique indices is plain stores.
    return KeyValuePool(
        *(
            x.at[number, storage.page].set(rows.astype(x.dtype), mode="drop", unique_indices=True)
            for x, rows in zip(pool, (k, v), strict=True)
        )
    )
