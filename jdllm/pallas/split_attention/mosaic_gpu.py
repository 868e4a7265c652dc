"""Split-S attention on Hopper: one kernel attends to pieces, a small one merges them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jdllm.pallas.attention.types import AttentionOutput
from jdllm.pallas.device import target
from jdllm.pallas.hopper import SHARED_BYTES, STRIP, padded_rows
from jdllm.pallas.products import Interpreted, TensorCores
from jdllm.pallas.split_attention.kernel import attention_partials
from jdllm.pallas.split_attention.launch import Inputs
from jdllm.pallas.split_attention.limits import check_mosaic_gpu
from jdllm.pallas.split_attention.merge import merge_partials
from jdllm.pallas.split_attention.tiles import Tiles, default_tiles
from jdllm.pallas.split_attention.types import FRESH_UNIT, Fresh, PageTable, Pool, Queries
from jdllm.pallas.split_attention.work import Shape
from jdllm.stored_rows import Float8Rows


def split_attention_mosaic_gpu(
    q: Queries,
    k_pool: Pool,
    v_pool: Pool,
    table: PageTable,
    *,
    fresh: tuple[Fresh, Fresh] | None = None,
    fresh_unit: int = FRESH_UNIT,
    layer: Int[Array, ""] | int,
    scale: float,
    chained: bool = False,
    tiles: Tiles | None = None,
) -> AttentionOutput:
    """Hopper form of `jdllm.pallas.split_attention.split_attention`.

    Arguments:
    - `chained`: part of a chain of kernels, where pools, `table` and `layer` are older.
    - `tiles`: the cut; by default one that suits the number of queries per key-value head.

    Raises `NotImplementedError`, naming the limit, for operands that it cannot take.
    """
    check_mosaic_gpu(q, k_pool)
    _, pages, kv_heads, page_rows, head_dim = k_pool.shape
    requests, queries, heads, _ = q.shape
    padding = 0 if queries == 1 else padded_rows(queries) - queries
    shape = Shape(requests, queries + padding, kv_heads, heads // kv_heads, head_dim, pages, page_rows)
    k, v = (pool.values if isinstance(pool, Float8Rows) else pool for pool in (k_pool, v_pool))
    scales = [pool.scales.reshape(-1) for pool in (k_pool, v_pool) if isinstance(pool, Float8Rows)]
    tiles = tiles or default_tiles(shape.tile_rows, head_dim, in_8_bits=bool(scales))
    _check_cut(shape, tiles, len(table.pages), in_8_bits=bool(scales))
    if padding:
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    inputs = Inputs(
        _whole_blocks(q.reshape(-1, head_dim)) if shape.single else q.reshape(-1, heads * head_dim),
        k.reshape(-1, head_dim),
        v.reshape(-1, head_dim),
        jnp.asarray(table.pages, jnp.int32),
        jnp.asarray(table.valid, jnp.int32),
        jnp.asarray(table.first, jnp.int32),
        jnp.asarray(layer, jnp.int32).reshape(1),
        (scales[0], scales[1]) if scales else None,
        jax.tree.map(lambda rows: _whole_blocks(rows).reshape(-1, kv_heads * head_dim), fresh),
    )
    products = TensorCores if target().on_cuda else Interpreted
    partials = attention_partials(
        inputs, shape, tiles, scale, products, chained=chained, fresh_unit=fresh_unit
    )
    o, m, total = merge_partials(partials, inputs.first, shape, tiles, q.dtype, chained=chained)
    return AttentionOutput(o[:, :queries], m[:, :queries], total[:, :queries])


def _whole_blocks(rows: Array) -> Array:
    return jnp.pad(rows, ((0, -len(rows) % STRIP), *((0, 0) for _ in rows.shape[1:])))


def _check_cut(shape: Shape, tiles: Tiles, entries: int, *, in_8_bits: bool) -> None:
    if in_8_bits != (tiles.stored_stages > 0):
        raise NotImplementedError(f"a cut with {tiles.stored_stages} stages of 8 bits does not fit the pool")
    if shape.tile_rows > tiles.rows:
        raise NotImplementedError(f"a cut for {tiles.rows} rows cannot take {shape.tile_rows}")
    if tiles.shared_bytes(shape.head_dim) > SHARED_BYTES:
        raise NotImplementedError(
            f"{tiles.stages} stages need {tiles.shared_bytes(shape.head_dim)} bytes, more than the "
            f"{SHARED_BYTES} of shared memory"
        )
    # Sharing out multiplies the number of a tile with that of a worker, in 32 bits.
    most = (2**31 - 1) // (shape.page_tiles * shape.kv_heads * tiles.workers)
    if entries > most:
        raise NotImplementedError(f"here a table has at most {most} entries, not {entries}")
