"""Split-S attention: the entry point."""

import math
from typing import Literal

from jaxtyping import Array, Int

from jdllm.pallas.attention.types import AttentionOutput
from jdllm.pallas.device import target
from jdllm.pallas.split_attention.limits import SPLIT_ATTENTION
from jdllm.pallas.split_attention.tiles import TILE
from jdllm.pallas.split_attention.types import FRESH_UNIT, Fresh, PageTable, Pool, Queries
from jdllm.stored_rows import Float8Rows

Implementation = Literal["mosaic_gpu", "triton", "xla", "reference"]


def split_attention(
    q: Queries,
    k_pool: Pool,
    v_pool: Pool,
    table: PageTable,
    *,
    fresh: tuple[Fresh, Fresh] | None = None,
    fresh_unit: int = FRESH_UNIT,
    layer: Int[Array, ""] | int = 0,
    scale: float,
    chained: bool = False,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Softmax attention of each request's queries over the keys of its table, all of which every query sees.

    Arguments:
    - `q`: rotated queries; query head h reads key-value head h // (heads / kv_heads).
    - `k_pool`, `v_pool`: rotated keys and values of all layers, in pages whose rows are a multiple of 64.
      Both are plain, or both are `Float8Rows`. Values that are not live must be finite (those of a pool that
      starts as zeros are). Pages count as a whole when work is shared out, so that small ones balance better.
    - `table`: the pages and fresh rows of each request.
    - `fresh`: keys and values that are not in the pool: those of the rows that ask. They have the type of the
      pool, or of the queries where the pool is `Float8Rows`. Needed where the table has any.
    - `fresh_unit`: fresh rows of an entry begin at a multiple of it, a divisor of `FRESH_UNIT`. Of less than
      `FRESH_UNIT` an entry has no more live rows.
    - `layer`: which layer of the pool; the pool is never sliced, which would copy it.
    - `scale`: factor of the scores, usually head_dim ** -0.5; positive.
    - `chained`: whether the kernel for Hopper is part of a chain (`jdllm.pallas.chain`): then the pools, the
      table and the layer are older than it.
    - `implementation`: "mosaic_gpu" (for Hopper), "triton" (from Ampere on, by the extras cuda12 and cuda13),
      "xla" (portable) or "reference" (dense oracle); by default the first that can run and is not turned off.

    Returns (o, m, l) as `AttentionOutput` describes, with `[requests, queries]` for its rows, to be merged
    with attention over other keys by `jdllm.pallas.attention.merge`; scores and softmax are f32.

    Raises `ValueError` for shapes that do not fit together, and `NotImplementedError` where the given
    implementation cannot run, naming its limit.
    """
    _check_shapes(q, k_pool, v_pool, table, scale)
    _check_fresh(q, k_pool, fresh, fresh_unit)

    form = SPLIT_ATTENTION.choose(target(), implementation, q, k_pool)
    options = {"fresh": fresh, "fresh_unit": fresh_unit, "layer": layer, "scale": scale}
    return form(q, k_pool, v_pool, table, **options, hints={"chained": chained})


def _check_shapes(q: Queries, k_pool: Pool, v_pool: Pool, table: PageTable, scale: float) -> None:
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(f"split attention: keys {k_pool.shape} and values {v_pool.shape} differ")
    _, _, kv_heads, page_rows, head_dim = k_pool.shape
    requests, _, heads, query_dim = q.shape
    if heads % kv_heads or query_dim != head_dim:
        raise ValueError(
            f"split attention: {heads} query heads of {query_dim} do not fit {kv_heads} key-value heads of "
            f"{head_dim}"
        )
    if page_rows % TILE or not page_rows:
        raise ValueError(f"split attention: pages have a multiple of {TILE} rows, not {page_rows}")
    if len(table.first) != requests + 1 or len(table.pages) != len(table.valid):
        raise ValueError(
            f"split attention: a table of {len(table.first) - 1} requests, {len(table.pages)} pages and "
            f"{len(table.valid)} counts does not fit {requests} requests"
        )
    if not 0 < scale < math.inf:
        raise ValueError(f"split attention: the scale is positive, not {scale}")


def _check_fresh(q: Queries, pool: Pool, fresh: tuple[Fresh, Fresh] | None, fresh_unit: int) -> None:
    if fresh_unit < 1 or FRESH_UNIT % fresh_unit:
        raise ValueError(
            f"split attention: fresh rows are counted in divisors of {FRESH_UNIT}, not {fresh_unit}"
        )
    kind = q.dtype if isinstance(pool, Float8Rows) else pool.dtype
    for rows in fresh or ():
        if rows.shape[1:] != (pool.shape[2], pool.shape[4]) or rows.dtype != kind:
            raise ValueError(
                f"split attention: fresh rows {rows.dtype} {rows.shape} do not fit a pool {pool.dtype} "
                f"{pool.shape} and queries {q.dtype}"
            )
