"""The transformer with a pool of keys and values: a refresh stores them, the steps that reuse read them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jdllm.arrays import Tensor
from jdllm.chunks import UNCUT, ChunkConfig
from jdllm.execution.few_rows.chain import ChainOperands, chain_operands, chains, chains_storing, run_chain
from jdllm.execution.paged.cut_refresh import CutRefresh
from jdllm.execution.paged.place import Place, store_rows
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.paged.selection import Selection, Storing, slots_of
from jdllm.execution.transformer import (
    DealtRows,
    Wanted,
    dealt_rows,
    embed,
    packed_ranges,
    ranges_of_wanted,
    scan_layers,
    scan_some_layers,
)
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.cards import ADDRESSES, joined_rows, own_heads
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Heads, KeysValues, Layer, Ranges
from jdllm.models.rotary import Rotation, rotation_at
from jdllm.models.weights import Params
from jdllm.pallas.attention import AttentionOutput
from jdllm.pallas.split_attention import PageTable, fresh_unit_of, split_attention
from jdllm.stored_rows import as_read

_Carry = tuple[Hidden, KvArrays]
_Body = Callable[[_Carry, Layer], _Carry]


class SelectedRanges(NamedTuple):
    """Packed rows that see ranges of each other, and of which a selection is stored: a `Sees`.

    - `ranges`: the rows that each row sees; these may be some of the rows, which cards deal out.
    - `pool`: stores the selected rows.
    - `part`: the model; on several cards the part of each, whose heads are stored.
    - `storing`: which rows are stored.
    """

    ranges: Ranges
    pool: KvArrays
    part: ModelConfig
    storing: Storing

    def attend(self, layer: Layer, h: Hidden) -> tuple[Heads, KvArrays]:
        q, keys_values, pool = self.store(layer, h)
        return self.ranges.over(layer, q, *keys_values)[0], pool

    def store(self, layer: Layer, h: Hidden) -> tuple[Heads, KeysValues, KvArrays]:
        """Write the selected rows; returns the queries of the rows `h`, and keys and values of all rows."""
        k, v, q = layer.project(h, self.ranges.rotation, ("k", "v", "q"))
        k, v = self.ranges.of_all_cards(layer, k, v)
        own = (q, k, v) if self.ranges.cards == 1 else self._of_own_heads(layer, q, k, v)
        return q, (k, v), self.storing.write(self.pool, self.part, layer.number, *own)

    def _of_own_heads(self, layer: Layer, q: Heads, k: Heads, v: Heads) -> tuple[Heads, Heads, Heads]:
        """What belongs to the heads of this card.

        Arguments:
        - `q`: of this card's rows and all heads; of all rows in the result where any are scored.
        - `k`, `v`: of all rows and all heads.
        """
        part, cards = self.part, self.part.cards
        q = joined_rows(q, cards, layer.weights.get(ADDRESSES)) if self.storing.scored else q
        k, v = (own_heads(x, part.num_kv_heads, cards, part.kv_copies, axis=1) for x in (k, v))
        return own_heads(q, part.num_heads, cards, 1, axis=1), k, v


class Pages(NamedTuple):
    """Tiles of rows that see pages of a pool and fresh rows: a `Sees`.

    - `rotation`: of the rows.
    - `pool`: read only.
    - `table`: the pages and the fresh rows of each tile; fresh rows begin where tiles begin.
    - `attention`: with the contract of `jdllm.pallas.split_attention.split_attention`.
    """

    rotation: Rotation
    pool: KvArrays
    table: PageTable
    attention: Callable[..., AttentionOutput]

    def attend(self, layer: Layer, h: Hidden) -> tuple[Array, None]:
        k, v, q = layer.project(h, self.rotation, ("k", "v", "q"))
        return self.over(q, k, v, layer=layer.number, scale=layer.config.attention_scale), None

    def over(self, q: Heads, k: Heads, v: Heads, **options: Any) -> Array:
        """Attention of rotated queries, `[tiles, rows, heads, head_dim]`."""
        by_tile = q.reshape(self.table.first.shape[0] - 1, -1, *q.shape[1:])
        unit = fresh_unit_of(by_tile.shape[1])
        return self.attention(by_tile, *self.pool, self.table, fresh=(k, v), fresh_unit=unit, **options).o


class StoredPages(NamedTuple):
    """Tiles of rows that see pages of a pool and fresh rows, and of which some are stored: a `Sees`.

    - `pages`: what the rows see.
    - `place`: where each row is stored; nobody sees the row there.
    """

    pages: Pages
    place: Place

    def attend(self, layer: Layer, h: Hidden) -> tuple[Array, KvArrays]:
        k, v, q = layer.project(h, self.pages.rotation, ("k", "v", "q"))
        # Written before it is read: else the compiler would have to read a copy.
        before = self.pages.pool
        stored = (jnp.asarray(self.place.page) < before.k.shape[1])[:, None]
        pool = store_rows(before, layer.number, self.place, k, v)
        k, v = (as_read(half, rows, stored) for half, rows in zip(before, (k, v), strict=True))
        scale = layer.config.attention_scale
        return self.pages._replace(pool=pool).over(q, k, v, layer=layer.number, scale=scale), pool


def forward_refresh(
    params: Params,
    config: ModelConfig,
    tokens: RowInts,
    rows: Rows,
    pool: KvArrays,
    selection: Selection,
    table: PageTable,
    *,
    scored: bool,
    usual: bool,
    wanted: Wanted,
    chunks: ChunkConfig = UNCUT,
) -> tuple[Hidden, KvArrays]:
    """Run all layers over whole sequences and store what each layer selects.

    Arguments:
    - `params`, `config`: stacked weights, and the model; the latter is static.
    - `tokens`, `rows`: int32 ids, and positions and key ranges, of all rows.
    - `pool`: carried through the layers and written in place; donate it.
    - `selection`: which rows may be stored, and how many.
    - `table`: the pages of each segment; how many of their rows are live does not matter here.
    - `scored`: whether any segment keeps its best candidates; static.
    - `usual`: whether all these are usual, as in `jdllm.execution.paged.selection.sources`; static.
    - `wanted`: the rows to return; for other rows the last layer makes keys and values only.
    - `chunks`: chunk counts, of which that of heads is 1; static. Where any operator of a layer is cut, the
      last layer is run for all rows.

    Returns the hidden rows of `wanted`, which storing does not change, and the pool.
    """
    if not chunks.layers_whole:
        storing = Storing(selection, slots_of(selection, table, pool.k.shape[3]), scored, usual)
        cut = CutRefresh(Rows(*map(jnp.asarray, rows)), storing)
        h, pool = cut.run(params, config, embed(params, tokens), pool, chunks)
        return h[wanted.rows], pool
    sees = _sees(config, rows, pool, selection, table, scored=scored, usual=usual)
    dealt = dealt_rows(params, rows, wanted)
    if dealt is None:
        body, last = _layers(sees, wanted)
        return scan_layers(params, config, (embed(params, tokens), pool), body, last=last)
    h = dealt.whole.dealt(embed(params, tokens))
    body, last = _layers(sees._replace(ranges=dealt.own), wanted, dealt)
    h, pool = dealt.scan((h, pool), body, last=last)
    return dealt.joined(h), pool


def forward_some_layers(
    params: Params,
    config: ModelConfig,
    h: Hidden,
    rows: Rows,
    pool: KvArrays,
    selection: Selection,
    table: PageTable,
    *,
    first: Int[Tensor, ""] | int,
    count: int,
    wanted: Wanted | None = None,
) -> tuple[Hidden, KvArrays]:
    """`count` layers of a scored and usual `forward_refresh` from layer `first` on, where all are alike.

    Arguments:
    - `h`: the rows that the layers before have made; before the first layer, embedded tokens.
    - `rows`: positions and key ranges of all rows.
    - `pool`: carried through the layers and written in place; donate it.
    - `selection`, `table`: which rows may be stored, how many, and the pages of each segment.
    - `first`: may be known on the device only.
    - `count`: static.
    - `wanted`: where the last of these layers is the model's last one.

    Returns the hidden rows, those of `wanted` where it is given, and the pool.
    """
    sees = _sees(config, rows, pool, selection, table, scored=True, usual=True)
    body, last = _layers(sees, wanted)
    return scan_some_layers(params, config, first, count, (h, pool), body, last=last)


def _sees(
    config: ModelConfig,
    rows: Rows,
    pool: KvArrays,
    selection: Selection,
    table: PageTable,
    *,
    scored: bool,
    usual: bool,
) -> SelectedRanges:
    """What is the same in all layers of a refresh."""
    storing = Storing(selection, slots_of(selection, table, pool.k.shape[3]), scored, usual)
    return SelectedRanges(packed_ranges(config, rows), pool, config, storing)


def _layers(
    sees: SelectedRanges, wanted: Wanted | None, dealt: DealtRows | None = None
) -> tuple[_Body, _Body | None]:
    """What a refresh does in a layer, and in the model's last layer, of which some rows are `wanted`.

    Arguments:
    - `dealt`: how cards deal out the rows; `None` where each has all of them.
    """

    def body(carry: _Carry, layer: Layer) -> _Carry:
        h, pool = carry
        return layer.apply(h, sees._replace(pool=pool))

    def last(carry: _Carry, layer: Layer) -> _Carry:
        assert wanted is not None
        h, pool = carry
        _, keys_values, pool = sees._replace(pool=pool).store(layer, h)  # all queries only to score keys
        if dealt is not None:
            return dealt.last(layer, h, wanted, keys_values), pool
        ranges = ranges_of_wanted(sees.ranges, wanted, keys_values)
        return layer.apply(h[wanted.rows], ranges)[0], pool

    return body, None if wanted is None else last


def forward_reuse(
    params: Params,
    config: ModelConfig,
    tokens: RowInts,
    rows: Rows,
    pool: KvArrays,
    table: PageTable,
    *,
    operands: ChainOperands | None = None,
    attention: Callable[..., AttentionOutput] | None = None,
) -> Hidden:
    """Run all layers over some rows of each sequence, against themselves and stored keys and values.

    Arguments:
    - `params`, `config`: stacked weights, and the model; the latter is static.
    - `tokens`, `rows`: int32 ids and positions of the rows; key ranges do not matter here.
    - `pool`: read only.
    - `table`: the packed rows are cut evenly into as many tiles as it has requests; each tile sees its own
      pages and, as fresh rows, some of the packed ones. All rows of a tile belong to one segment.
    - `operands`: of the chain, where a loop has made them and the layers are one.
    - `attention`: the attention to use, with the contract of `jdllm.pallas.split_attention.split_attention`,
      which is the default; with another one the layers are no chain.

    Returns the hidden rows.
    """
    rotation = rotation_at(config.rope, config.head_dim, rows.positions)
    h, sees = embed(params, tokens), Pages(rotation, pool, table, attention or split_attention)
    if attention is None and chains(params, config, len(tokens)):
        made = operands or chain_operands(params, config)
        attend = functools.partial(sees.over, scale=config.attention_scale)
        return run_chain(params, config, made, h, rotation, attend)[0]
    return scan_layers(params, config, h, lambda h, layer: layer.apply(h, sees)[0], few_rows=len(tokens))


def forward_storing(
    params: Params,
    config: ModelConfig,
    tokens: RowInts,
    rows: Rows,
    pool: KvArrays,
    table: PageTable,
    place: Place,
) -> tuple[Hidden, KvArrays]:
    """`forward_reuse`, which also stores some of the rows.

    Arguments:
    - `params`, `config`: stacked weights, and the model; the latter is static.
    - `tokens`, `rows`: int32 ids and positions of the rows; key ranges do not matter here.
    - `pool`: written in place: donate it.
    - `table`: what each tile of rows sees, as `forward_reuse` describes it: of the pool no row that is stored
      now, which the tile sees as a fresh row instead.
    - `place`: where each row is stored.

    Returns the hidden rows, and the pool.
    """
    rotation = rotation_at(config.rope, config.head_dim, rows.positions)
    h, sees = embed(params, tokens), Pages(rotation, pool, table, split_attention)
    if chains_storing(params, config, len(tokens)):
        attend = functools.partial(sees.over, scale=config.attention_scale)
        made = chain_operands(params, config)
        # Nothing may stand between two layers, and the last one reads the pool that is written then.
        h, stored = lax.optimization_barrier(run_chain(params, config, made, h, rotation, attend))
        k, v = (jnp.stack(of_layers, axis=1) for of_layers in zip(*stored, strict=True))
        return h, store_rows(pool, slice(None), place, k, v)

    def body(carry: _Carry, layer: Layer) -> _Carry:
        h, pool = carry
        return layer.apply(h, StoredPages(sees._replace(pool=pool), place))

    return scan_layers(params, config, (h, pool), body, few_rows=len(tokens))
