"""The forms of Split-S attention, and what those for NVIDIA cards can take."""

import jax
import jax.numpy as jnp

from jdllm.pallas.attention.limits import MOST_HEAD_DIM
from jdllm.pallas.device import target
from jdllm.pallas.dispatch import Form, Operator, forms_of
from jdllm.pallas.split_attention.tiles import MAX_ROWS
from jdllm.pallas.split_attention.types import Pool, Queries
from jdllm.pallas.split_attention.work import tile_rows
from jdllm.stored_rows import Float8Rows

HEAD_DIMS = (64, 128)

ADA = 8.9
"""The least compute capability of a card that converts floats of 8 bits (E4M3)."""


def check_mosaic_gpu(q: Queries | jax.ShapeDtypeStruct, k_pool: Pool | jax.ShapeDtypeStruct) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper kernel cannot attend `q`."""
    in_8_bits = isinstance(k_pool, Float8Rows)
    known = q.dtype == jnp.bfloat16 or (q.dtype == jnp.float16 and not in_8_bits)
    if not known or not (in_8_bits or q.dtype == k_pool.dtype):
        raise NotImplementedError(
            "the Hopper form of split attention takes queries and a pool that are both bfloat16 or both "
            f"float16, or bfloat16 and a pool in 8 bits, not {q.dtype} and {k_pool.dtype}"
        )
    _, queries, heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(
            f"the Hopper form of split attention takes heads of {HEAD_DIMS}, not of {head_dim}"
        )
    rows = tile_rows(queries, heads // k_pool.shape[2])
    if rows > MAX_ROWS:
        raise NotImplementedError(
            f"the Hopper form of split attention takes at most {MAX_ROWS} rows of queries per key-value "
            f"head, not {rows}"
        )


def check_triton(q: Queries | jax.ShapeDtypeStruct, k_pool: Pool | jax.ShapeDtypeStruct) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Triton kernel cannot attend `q`."""
    in_8_bits = isinstance(k_pool, Float8Rows)
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or not (in_8_bits or q.dtype == k_pool.dtype):
        raise NotImplementedError(
            "split attention in Triton takes queries and a pool that are both bfloat16, float16 or float32,"
            f" or a pool in 8 bits, not {q.dtype} and {k_pool.dtype}"
        )
    capability = target().capability
    if in_8_bits and capability is not None and capability < ADA:
        raise NotImplementedError(
            f"split attention in Triton takes a pool in 8 bits on cards from Ada on ({ADA}), not on"
            f" {capability}"
        )
    if q.shape[-1] > MOST_HEAD_DIM:
        raise NotImplementedError(
            f"split attention in Triton takes heads of up to {MOST_HEAD_DIM}, not of {q.shape[-1]}"
        )


SPLIT_ATTENTION = Operator[None](
    "split attention",
    forms_of(
        "jdllm.pallas.split_attention",
        Form("mosaic_gpu", check_mosaic_gpu, "mosaic_gpu", hints=("chained",)),
        Form("triton", check_triton, "triton"),
        Form("xla"),
        Form("reference"),
    ),
)
"""Checked by queries and the pool of keys."""
