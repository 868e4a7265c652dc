"""Split-S attention in Triton."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jdllm.pallas.attention.api import merge_stacked
from jdllm.pallas.attention.types import AttentionOutput
from jdllm.pallas.device import target
from jdllm.pallas.split_attention.limits import check_triton
from jdllm.pallas.split_attention.tiles import TILE
from jdllm.pallas.split_attention.triton_kernel import attend
from jdllm.pallas.split_attention.types import FRESH_UNIT, Fresh, PageTable, Pool, Queries
from jdllm.pallas.triton_launch import Schedule, Sizes, SizeTable, block, fitting, launch, score_depth
from jdllm.stored_rows import Float8Rows

PROGRAMS = 512
"""As many keep any card busy, four on each multiprocessor of an H200."""


_SIZES: SizeTable[Sizes] = {
    2: (
        (64, 99, Sizes(64, 64, Schedule(4, 4))),
        (128, 227, Sizes(64, 64, Schedule(4, 3))),
        (128, 163, Sizes(64, 64, Schedule(4, 4))),
        (128, 99, Sizes(64, 64, Schedule(4, 2))),
        (256, 163, Sizes(32, 64, Schedule(4, 2))),
        (256, 99, Sizes(32, 32, Schedule(4, 2))),
    ),
    4: (
        (128, 99, Sizes(32, 32, Schedule(4, 3))),
        (256, 99, Sizes(32, 32, Schedule(4, 2))),
    ),
}


sizes_for = functools.partial(fitting, _SIZES)


def split_attention_triton(
    q: Queries,
    k_pool: Pool,
    v_pool: Pool,
    table: PageTable,
    *,
    fresh: tuple[Fresh, Fresh] | None = None,
    fresh_unit: int = FRESH_UNIT,
    layer: Int[Array, ""] | int = 0,
    scale: float,
    sizes: Sizes | None = None,
) -> AttentionOutput:
    """Triton form of `jdllm.pallas.split_attention.split_attention`.

    Probabilities are rounded to the type of the values before the second product, as in any flash attention.

    Arguments:
    - `sizes`: by default those of the device that is traced for.

    Raises `NotImplementedError` where `check_triton` does.
    """
    check_triton(q, k_pool)
    requests, queries, heads, head_dim = q.shape
    _, pages, kv_heads, page_rows, _ = k_pool.shape
    (k_rows, k_scales), (v_rows, v_scales) = map(_parts, (k_pool, v_pool))
    sizes = sizes or sizes_for(head_dim, q.dtype.itemsize, target().capability)
    rows = heads // kv_heads * queries
    block_rows = min(block(rows), sizes.rows)
    row_blocks = -(-rows // block_rows)
    parts = parts_of(len(table.pages), requests * kv_heads * row_blocks)
    residual = jax.ShapeDtypeStruct((parts, *q.shape[:3]), jnp.float32)
    kind = q.dtype if parts == 1 else jnp.float32
    found = launch(
        attend,
        *(q, k_rows, v_rows, k_scales, v_scales, *(fresh or (k_rows, v_rows))),
        *(jnp.asarray(x, jnp.int32) for x in table),
        *(jnp.asarray(layer, jnp.int32).reshape(1), pages),
        out_shape=[jax.ShapeDtypeStruct((parts, *q.shape), kind), residual, residual],
        grid=(parts * row_blocks, kv_heads, requests),
        schedule=sizes.schedule,
        PARTS=parts,
        QUERIES=queries,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        PAGE_ROWS=page_rows,
        HEAD_DIM=head_dim,
        FRESH_UNIT=0 if fresh is None else fresh_unit,
        SCALED=isinstance(k_pool, Float8Rows),
        SCALE=scale * math.log2(math.e),
        BLOCK_R=block_rows,
        BLOCK_K=math.gcd(sizes.keys, page_rows, TILE),
        BLOCK_D=block(head_dim),
        DEPTH=score_depth(head_dim, q.dtype.itemsize),
    )
    o, m, total = merge_stacked(AttentionOutput(*found))
    return AttentionOutput(o.astype(q.dtype), m, total)


def _parts(pool: Pool) -> tuple[Array, Array]:
    """The numbers of a pool, and their scales; where it has none something that is not read."""
    return (pool.values, pool.scales) if isinstance(pool, Float8Rows) else (pool, pool)


def parts_of(entries: int, programs: int) -> int:
    """Parts that the entries of each request are cut into, where each has so many programs."""
    return max(1, min(PROGRAMS // programs, entries, 64))
