"""One token more of many sequences: each row sees the stored rows of its sequence, and is stored itself."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jdllm.execution.few_rows.chain import ChainOperands, chain_operands, run_chain
from jdllm.execution.paged.place import Place, store_rows
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.paged.stored_keys import StoredKeys, over_stored_keys
from jdllm.execution.transformer import embed, scan_layers
from jdllm.models.block import Hidden, RowInts
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Heads, Layer
from jdllm.models.rotary import Rotation, rotation_at
from jdllm.models.weights import Params
from jdllm.pallas.split_attention import FRESH_UNIT, PageTable, split_attention


class Window(NamedTuple):
    """What rows see that do not see all of their sequence.

    - `keys`: pages.
    - `start`, `end`: the range of their rows that each row sees.
    """

    keys: StoredKeys
    start: RowInts
    end: RowInts


class StoredRows(NamedTuple):
    """One row of each sequence, which is stored and sees the stored rows of its sequence: a `Sees`.

    - `rotation`: of the rows.
    - `pool`: stored keys and values; the rows' own are written into it.
    - `place`: where each row is stored.
    - `seen`: the pages or ranges of rows that each row sees, itself included.
    """

    rotation: Rotation
    pool: KvArrays
    place: Place
    seen: PageTable | Window

    def attend(self, layer: Layer, h: Hidden) -> tuple[Heads, KvArrays]:
        k, v, q = layer.project(h, self.rotation, ("k", "v", "q"))
        pool = store_rows(self.pool, layer.number, self.place, k, v)
        scale = layer.config.attention_scale
        if isinstance(self.seen, PageTable):
            found = split_attention(q[:, None], *pool, self.seen, layer=layer.number, scale=scale)
            return found.o[:, 0], pool
        keys, start, end = self.seen
        return over_stored_keys(q, start, end, keys, pool, layer.number, scale).o, pool


def forward_decode(
    params: Params,
    config: ModelConfig,
    tokens: RowInts,
    positions: RowInts,
    pool: KvArrays,
    place: Place,
    seen: PageTable | Window,
) -> tuple[Hidden, KvArrays]:
    """Run all layers over one row of each sequence.

    Arguments:
    - `params`, `config`: stacked weights, and the model; the latter is static.
    - `tokens`, `positions`: of the rows.
    - `pool`: stored keys and values; the rows' own are written into it, in place: donate it.
    - `place`: where each row is stored, no two in the same place.
    - `seen`: the rows that each row sees, itself included: all live rows of pages, or ranges of rows.

    Returns the hidden rows after the last layer, and the pool.
    """
    rotation = rotation_at(config.rope, config.head_dim, positions)

    def body(carry: tuple[Hidden, KvArrays], layer: Layer) -> tuple[Hidden, KvArrays]:
        h, pool = carry
        return layer.apply(h, StoredRows(rotation, pool, place, seen))

    return scan_layers(params, config, (embed(params, jnp.asarray(tokens)), pool), body, few_rows=len(tokens))


def chain_rows(sequences: int) -> int:
    """Rows of a chain for so many sequences: one each, or as many equal ones as fill blocks.

    Anything that would have to be padded on the way from one kernel to the next would break the chain.
    """
    return sequences if sequences % FRESH_UNIT == 0 else sequences * FRESH_UNIT


def forward_decode_chained(
    params: Params,
    config: ModelConfig,
    tokens: RowInts,
    positions: RowInts,
    pool: KvArrays,
    place: Place,
    table: PageTable,
    *,
    operands: ChainOperands | None = None,
) -> tuple[Hidden, KvArrays]:
    """`forward_decode` as a chain of kernels, for which `chains` must hold with the sequences' `chain_rows`.

    Arguments:
    - `params`, `config`: stacked weights, and the model; the latter is static.
    - `tokens`, `positions`: of the rows.
    - `pool`: stored keys and values; the rows' own are written into it, in place: donate it.
    - `place`: where each row is stored, no two in the same place.
    - `table`: the rows that each row sees: in the pool without itself, and itself as the fresh row of the
      same number.
    - `operands`: of the chain, if a loop has made them.

    A kernel of the chain may not wait for writes into the pool: the rows of all layers are written after the
    last layer.
    """
    same = chain_rows(len(tokens)) // len(tokens)
    tokens, positions = (jnp.repeat(jnp.asarray(x), same) for x in (tokens, positions))
    rotation, scale = rotation_at(config.rope, config.head_dim, positions), config.attention_scale

    def attend(q: Heads, k: Heads, v: Heads, *, layer: Array, chained: bool) -> Array:
        by_sequence, fresh = q.reshape(-1, same, *q.shape[1:]), (k, v)
        return split_attention(
            by_sequence, *pool, table, fresh=fresh, fresh_unit=same, layer=layer, scale=scale, chained=chained
        ).o

    # Nothing may stand between two layers, and the last one reads the pool that is written then.
    made, h = operands or chain_operands(params, config), embed(params, tokens)
    h, stored = lax.optimization_barrier(run_chain(params, config, made, h, rotation, attend))
    k, v = (
        jnp.stack([rows[::same] for rows in of_layers], axis=1) for of_layers in zip(*stored, strict=True)
    )
    return h[::same], store_rows(pool, slice(None), place, k, v)
