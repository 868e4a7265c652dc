"""The transformer over parts of sequences.

Rows see each other by their ranges, and stored rows. Their own keys and values are stored too,
at other positions where asked.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jdllm.arrays import Tensor
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.paged.stored_keys import StoredKeys, over_stored_keys
from jdllm.execution.transformer import Wanted, embed, packed_ranges, ranges_of_wanted, scan_layers
from jdllm.layers import rotate
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.cards import own_heads
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Heads, Layer, LayerNumber, Ranges, turned
from jdllm.models.rotary import cos_sin
from jdllm.models.weights import Params
from jdllm.pallas.attention import AttentionOutput, merge
from jdllm.pallas.split_attention import PageTable, split_attention
from jdllm.stored_rows import as_read, as_stored


class Storage(NamedTuple):
    """Which rows are stored, and where.

    - `page`: the page that each entry fills; beyond any pool, and no two the same, where it is none.
    - `source`: the packed row of each slot, with one layer for all, or one head, where they are the same.
    - `positions`: the stored keys are rotated to these, whatever their positions among the packed rows.
    - `kept`: how many of the first slots of each page stay as they are; `None` where pages are filled whole.
    """

    page: Int[Tensor, " entries"]
    source: Int[Tensor, "#layers entries #kv_heads page_rows"]
    positions: Int[Tensor, "entries page_rows"]
    kept: Int[Tensor, " entries"] | None = None


class PackedParts(NamedTuple):
    """Packed rows, and the keys that they see beside each other.

    - `tokens`, `rows`: int32 ids, and positions and key ranges, of all rows. With `keys`, ranges count in
      the rows of `keys`.
    - `keys`: the keys that ranges refer to, read after `storage` was written; `None` for the rows' own keys.
    - `own`: rows that see their own key, which lies outside their range; `None` if no row does.
    - `table`: the pages that each tile of rows sees; the table has a request for each tile. `None` if no page
      is read.
    - `storage`: the rows to store; `None` if no row is stored.
    - `wanted`: the rows whose hidden states are wanted.
    """

    tokens: RowInts
    rows: Rows
    own: Bool[Tensor, " rows"] | None
    table: PageTable | None
    storage: Storage | None
    wanted: Wanted
    keys: StoredKeys | None = None


Seen = StoredKeys | PageTable | None
"""Stored rows that parts see: keys that their ranges refer to, their own among them; the pages that each tile
of them sees beside the rows of its ranges; or none beside these."""


def seeing(parts: PackedParts, seen: Seen) -> PackedParts:
    """The parts, which see stored rows too."""
    if isinstance(seen, PageTable):
        return parts._replace(table=seen)
    return parts._replace(keys=seen)


class PartRows(NamedTuple):
    """Rows of parts, which are stored and see what `parts` says: a `Sees`.

    - `ranges`: of the rows.
    - `parts`: the rows.
    - `pool`: stored keys and values; `None` if nothing is read or stored.
    """

    ranges: Ranges
    parts: PackedParts
    pool: KvArrays | None

    def attend(self, layer: Layer, h: Hidden) -> tuple[Heads, KvArrays | None]:
        q, k, v = layer.project_unrotated(h, ("q", "k", "v"))
        pool = _store(layer, self.parts.storage, self.pool, k, v)
        q, k = (turned(name, x, self.ranges.rotation) for name, x in (("q", q), ("k", k)))
        own = None if self.parts.own is None else (self.parts.own, k, v)
        k, v = _as_read(self.parts, self.pool, k, v)
        return _outputs(layer, q, self.ranges._replace(keys_values=(k, v)), own, self.parts, pool), pool


class WantedRows(NamedTuple):
    """Some of the rows of parts, whose keys and values are stored already: a `Sees`.

    - `ranges`: of these rows, with the keys and values of all.
    - `own`: which of them see their own key, and their own keys and values.
    - `parts`: all rows.
    - `pool`: stored keys and values; `None` if nothing is read or stored.
    """

    ranges: Ranges
    own: tuple[Bool[Array, " rows"], Heads, Heads] | None
    parts: PackedParts
    pool: KvArrays | None

    def attend(self, layer: Layer, h: Hidden) -> tuple[Heads, None]:
        (q,) = layer.project(h, self.ranges.rotation, ("q",))
        return _outputs(layer, q, self.ranges, self.own, self.parts, self.pool), None


def forward_parts(
    params: Params, config: ModelConfig, parts: PackedParts, pool: KvArrays | None
) -> tuple[Hidden, KvArrays | None]:
    """Run all layers.

    Arguments:
    - `params`, `config`: stacked weights, and the model; the latter is static.
    - `parts`: the rows.
    - `pool`: stored keys and values. With storage the pool is written in place: donate it. `None` if nothing
      is read or stored.

    Returns the wanted hidden rows, in their order, and the pool.
    """
    ranges, (rows, live) = packed_ranges(config, parts.rows), parts.wanted

    def body(carry: tuple[Hidden, KvArrays | None], layer: Layer) -> tuple[Hidden, KvArrays | None]:
        h, pool = carry
        return layer.apply(h, PartRows(ranges, parts, pool))

    def last(carry: tuple[Hidden, KvArrays | None], layer: Layer) -> tuple[Hidden, KvArrays | None]:
        h, pool = carry
        k, v = layer.project_unrotated(h, ("k", "v"))
        pool = _store(layer, parts.storage, pool, k, v)
        k = turned("k", k, ranges.rotation)
        own = None if parts.own is None else (jnp.asarray(parts.own)[rows] & live, k[rows], v[rows])
        k, v = _as_read(parts, pool, k, v)
        seen = ranges_of_wanted(ranges, parts.wanted, (k, v))
        return layer.apply(h[rows], WantedRows(seen, own, parts, pool))[0], pool

    carry = embed(params, jnp.asarray(parts.tokens)), pool
    if parts.table is None:
        return scan_layers(params, config, carry, body, last=last)
    # Tiles see pages together: the rows that are wanted are no tiles.
    h, pool = scan_layers(params, config, carry, body, few_rows=len(parts.tokens))
    return h[rows], pool


def forward_reading(params: Params, config: ModelConfig, parts: PackedParts, pool: KvArrays) -> Hidden:
    """Run all layers over parts of which no row is stored.

    Arguments:
    - `params`, `config`: stacked weights, and the model; the latter is static.
    - `parts`: the rows, with a table and without storage.
    - `pool`: stored keys and values, read only.

    Returns the wanted hidden rows, in their order.
    """
    ranges = packed_ranges(config, parts.rows)
    sees = PartRows(ranges, parts, pool)
    h = embed(params, jnp.asarray(parts.tokens))
    h = scan_layers(params, config, h, lambda h, layer: layer.apply(h, sees)[0], few_rows=len(parts.tokens))
    return h[parts.wanted.rows]


def _outputs(
    layer: Layer,
    q: Heads,
    ranges: Ranges,
    own: tuple[Bool[Tensor, " rows"], Heads, Heads] | None,
    parts: PackedParts,
    pool: KvArrays | None,
) -> Heads:
    """Attention of rotated queries over everything that they see.

    Arguments:
    - `ranges`: theirs, with the keys and values of all rows.
    - `own`: which of them see their own key, and their own keys and values.
    """
    scale, (_, start, end) = layer.config.attention_scale, ranges.rows
    if parts.keys is not None and pool is not None:
        found = [over_stored_keys(q, start, end, parts.keys, pool, layer.number, scale)]
    else:
        assert ranges.keys_values is not None
        found = [AttentionOutput(*ranges.over(layer, q, *ranges.keys_values))]
    if own is not None:
        found.append(_of_itself(q, *own, scale))
    if parts.table is not None and pool is not None:
        found.append(_of_stored(q, pool, parts.table, layer.number, scale))
    return (found[0] if len(found) == 1 else merge(found)).o


def _of_stored(
    q: Heads, pool: KvArrays, table: PageTable, number: LayerNumber, scale: float
) -> AttentionOutput:
    tiles = len(table.first) - 1
    by_tile = q.reshape(tiles, -1, *q.shape[1:])
    found = split_attention(by_tile, *pool, table, layer=number, scale=scale)
    return AttentionOutput(*(x.reshape(q.shape[0], *x.shape[2:]) for x in found))


def _of_itself(q: Heads, own: Bool[Tensor, " rows"], k: Heads, v: Heads, scale: float) -> AttentionOutput:
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


def _as_read(parts: PackedParts, pool: KvArrays | None, k: Heads, v: Heads) -> tuple[Heads, Heads]:
    """Rotated keys and values of all rows, as others will read those that parts store."""
    if parts.storage is None or pool is None:
        return k, v
    return as_read(pool.k, k), as_read(pool.v, v)


def _store(
    layer: Layer, storage: Storage | None, pool: KvArrays | None, k: Heads, v: Heads
) -> KvArrays | None:
    """Write unrotated keys and values of one layer into whole pages, rotated to their new positions."""
    if storage is None or pool is None:
        return pool
    config, number = layer.config, layer.number
    layers = storage.source.shape[0]
    source = lax.dynamic_index_in_dim(
        jnp.asarray(storage.source), jnp.minimum(number, layers - 1), keepdims=False
    )
    if source.shape[1] > 1:
        source = own_heads(source, k.shape[1], config.cards, config.kv_copies, axis=1)
    head = jnp.arange(k.shape[1])[:, None]
    k, v = (x.at[source, head].get(mode="promise_in_bounds") for x in (k, v))
    cos, sin = cos_sin(config.rope, config.head_dim, jnp.asarray(storage.positions).reshape(-1))
    by_slot = jnp.moveaxis(k, 1, 2).reshape(cos.shape[0], k.shape[1], k.shape[3])
    rotated = rotate(by_slot, cos, sin).reshape(k.shape[0], k.shape[2], k.shape[1], k.shape[3])
    k = jnp.moveaxis(rotated, 2, 1)
    stored = KvArrays(as_stored(pool.k, k), as_stored(pool.v, v))
    if storage.kept is not None:
        slot = jnp.arange(k.shape[2], dtype=jnp.int32)
        new = (slot >= jnp.asarray(storage.kept)[:, None])[:, None, :]

        def keep(x: Array, rows: Array) -> Array:
            before = x.at[number, storage.page].get(mode="clip")
            return jnp.where(new.reshape(*new.shape, *(1,) * (rows.ndim - new.ndim)), rows, before)

        stored = jax.tree.map(keep, pool, stored)
    # Only a scatter of unique indices is plain stores.
    return jax.tree.map(
        lambda x, rows: x.at[number, storage.page].set(rows, mode="drop", unique_indices=True), pool, stored
    )
