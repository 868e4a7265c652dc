"""The pool of keys and values on the device: its pages, its shape and its bytes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Float

from jdllm.errors import KvPoolError
from jdllm.models.config import ModelConfig
from jdllm.pallas.split_attention.tiles import TILE
from jdllm.quantised import FLOAT8
from jdllm.stored_rows import Float8Rows

SCRATCH_PAGE = 0
"""What the padding of page tables names; no request ever holds it."""

PAGE_ROWS = 64
"""Rows of a page."""


class KvArrays(NamedTuple):
    """Rotated keys and values of all layers and requests, in pages; one of them is `SCRATCH_PAGE`."""

    k: Float[Array, "layers pages kv_heads page_rows head_dim"] | Float8Rows
    v: Float[Array, "layers pages kv_heads page_rows head_dim"] | Float8Rows


def empty_pool(
    config: ModelConfig,
    pages: int,
    page_rows: int,
    dtype: jnp.dtype | str,
    sharding: Sharding | None = None,
) -> KvArrays:
    """A pool of zeros, on the default device unless a `sharding` says where.

    Arguments:
    - `config`: the model, which says whether keys and values are stored in 8 bits.
    - `dtype`: of keys and values that are not.
    """
    form = _half(config, pages, page_rows, dtype)
    return KvArrays(
        *(
            jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype, device=sharding), form)
            for _ in range(2)
        )
    )


def pool_shape(config: ModelConfig, pages: int, page_rows: int) -> tuple[int, int, int, int, int]:
    """The shape of the pool's keys, and of its values: `[layers, pages, kv_heads, page_rows, head_dim]`.

    Raises `KvPoolError` where `page_rows` is no multiple of 64.
    """
    check_page_rows(page_rows)
    return (config.num_layers, pages, config.num_kv_heads, page_rows, config.head_dim)


def pool_bytes(config: ModelConfig, dtype: str, pages: int, page_rows: int) -> int:
    """Bytes of a pool's keys and values, the scratch page's among them.

    Arguments:
    - `config`: the model, which says whether keys and values are stored in 8 bits.
    - `dtype`: of keys and values that are not.
    """
    parts = jax.tree.leaves(_half(config, pages, page_rows, dtype))
    return 2 * sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)


def _half(
    config: ModelConfig, pages: int, page_rows: int, dtype: jnp.dtype | str
) -> jax.ShapeDtypeStruct | Float8Rows:
    """Shapes and types of a pool's keys, which are those of its values."""
    shape = pool_shape(config, pages, page_rows)
    if config.kv_cache_dtype == "auto":
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    parts: Any = jax.ShapeDtypeStruct(shape, FLOAT8), jax.ShapeDtypeStruct(shape[:-1], jnp.bfloat16)
    return Float8Rows(*parts)


def check_page_rows(page_rows: int) -> None:
    """Raise `KvPoolError` for pages that attention cannot read: a page needs a positive multiple of 64
    rows."""
    if page_rows < TILE or page_rows % TILE:
        raise KvPoolError(f"pages of {page_rows} rows: expected a positive multiple of {TILE}")
