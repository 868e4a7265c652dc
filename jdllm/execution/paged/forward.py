"""The transformer with a pool of keys and values: a refresh stores them, the steps that reuse read them."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from jdllm.execution.few_rows.chain import ChainOperands, chain_operands, chains, run_chain
from jdllm.execution.paged.pool import KeyValuePool
from jdllm.execution.paged.selection import Selection, slots_of, sources, store
from jdllm.execution.transformer import Wanted, attention_over, embed, last_block, scan_layers
from jdllm.models.block import AttentionFn, Hidden, Layer, RowInts, Rows, block, project
from jdllm.models.config import ModelConfig
from jdllm.models.moe import GroupedMatmulFn
from jdllm.models.rotary import cos_sin
from jdllm.models.weights import Params
from jdllm.pallas.attention import AttentionOutput
from jdllm.pallas.grouped_matmul import grouped_matmul as default_grouped_matmul
from jdllm.pallas.split_attention import PageTable, split_attention


def forward_refresh(
    params: Params,
    config: ModelConfig,
    tokens: RowInts,
    rows: Rows,
    pool: KeyValuePool,
    selection: Selection,
    table: PageTable,
    *,
    scored: bool,
    wanted: Wanted,
    attention: AttentionFn | None = None,
    grouped_matmul: GroupedMatmulFn = default_grouped_matmul,
) -> tuple[Hidden, KeyValuePool]:
    """Run all layers over whole sequences and store what each layer selects.

    Arguments:
    - `params`, `config`, `tokens`, `rows`, `attention`, `grouped_matmul`: as of
      `jdllm.execution.transformer.forward`.
    - `pool`: carried through the layers and written in place; donate it.
    - `selection`: which rows may be stored, and how many.
    - `table`: the pages of each segment; how many of their rows are live does not matter here.
    - `scored`: as of `sources`; static.
    - `wanted`: as of `jdllm.execution.transformer.forward_wanted`.

    Returns the hidden rows of `wanted`, which storing does not change, and the pool.
    """
    rotation = cos_sin(config.rope, config.head_dim, rows.positions)
    slots = slots_of(selection, table, pool.k.shape[3])
    attention = attention or attention_over(rows)

    def body(carry: tuple[Hidden, KeyValuePool], layer: Layer, number: Array) -> tuple[Hidden, KeyValuePool]:
        h, pool = carry
        stored: list[KeyValuePool] = []

        def attend(q: Array, k: Array, v: Array, *bounds: RowInts, scale: float) -> Any:
            source = sources(q, k, selection, slots, scored=scored)
            stored.append(KeyValuePool(*store(*pool, number, k, v, slots.page, source)))
            return attention(q, k, v, *bounds, scale=scale)

        h = block(layer, config, h, rotation, rows, attend, grouped_matmul)
        return h, stored[0]

    def last(carry: tuple[Hidden, KeyValuePool], layer: Layer, number: Array) -> tuple[Hidden, KeyValuePool]:
        h, pool = carry
        q, k, v = project(layer, config, h, rotation, ("q", "k", "v"))  # all queries only to score keys
        source = sources(q, k, selection, slots, scored=scored)
        pool = KeyValuePool(*store(*pool, number, k, v, slots.page, source))
        return last_block(layer, config, h, rotation, rows, (k, v), wanted, grouped_matmul), pool

    return scan_layers(params, config, (embed(params, tokens), pool), body, last=last)


def forward_reuse(
    params: Params,
    config: ModelConfig,
    tokens: RowInts,
    rows: Rows,
    pool: KeyValuePool,
    table: PageTable,
    *,
    operands: ChainOperands | None = None,
    attention: Callable[..., AttentionOutput] | None = None,
    grouped_matmul: GroupedMatmulFn = default_grouped_matmul,
) -> Hidden:
    """Run all layers over some rows of each sequence, against themselves and what is stored.

    Arguments:
    - `rows`: their key ranges do not matter here.
    - `pool`: read only.
    - `table`: the packed rows are cut evenly into as many tiles as it has requests; each tile sees its own
      pages and, as fresh rows, some of the packed ones. All rows of a tile belong to one segment.
    - `operands`: of the chain, where a loop has made them and the layers are one.
    - `attention`: the attention to use, with the contract of `jdllm.pallas.split_attention.split_attention`,
      which is the default; with another one the layers are no chain.
    - the others: as of `jdllm.execution.transformer.forward`.

    Returns the hidden rows.
    """
    rotation = cos_sin(config.rope, config.head_dim, rows.positions)
    h, scale, tiles = embed(params, tokens), config.head_dim**-0.5, table.first.shape[0] - 1
    attend_to = attention or split_attention

    def attend(q: Array, k: Array, v: Array, **options: Any) -> AttentionOutput:
        by_tile = q.reshape(tiles, -1, *q.shape[1:])
        return attend_to(by_tile, *pool, table, fresh=(k, v), scale=scale, **options)

    if attention is None and chains(params, config, len(tokens)):
        made = operands or chain_operands(params, config)
        hidden, _ = run_chain(
            params, config, made, h, rotation, lambda *qkv, **options: attend(*qkv, **options).o
        )
        return hidden

    def body(h: Hidden, layer: Layer, number: Array) -> Hidden:
        def attend_layer(q: Array, k: Array, v: Array, *_: RowInts, scale: float) -> AttentionOutput:
            return attend(q, k, v, layer=number)

        return block(layer, config, h, rotation, rows, attend_layer, grouped_matmul)

    return scan_layers(params, config, h, body, few_rows=len(tokens))
