"""The pool of keys and values on the device: its pages, its shape and its bytes."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Float

from jdllm.errors import KvPoolError
from jdllm.models.config import ModelConfig
from jdllm.pallas.split_attention.tiles import TILE

SCRATCH_PAGE = 0
"""What the padding of page tables names; no request ever holds it."""

PAGE_ROWS = 64
"""Rows of a page."""


class KvArrays(NamedTuple):
    """Rotated keys and values of all layers and requests, in pages; one of them is `SCRATCH_PAGE`."""

    k: Float[Array, "layers pages kv_heads page_rows head_dim"]
    v: Float[Array, "layers pages kv_heads page_rows head_dim"]


def empty_pool(
    config: ModelConfig,
    pages: int,
    page_rows: int,
    dtype: jnp.dtype | str,
    sharding: Sharding | None = None,
) -> KvArrays:
    """A pool of zeros, on the default device unless a `sharding` says where."""
    shape = pool_shape(config, pages, page_rows)
    return KvArrays(*(jnp.zeros(shape, dtype, device=sharding) for _ in range(2)))


def pool_shape(config: ModelConfig, pages: int, page_rows: int) -> tuple[int, int, int, int, int]:
    """The shape of the pool's keys, and of its values: `[layers, pages, kv_heads, page_rows, head_dim]`.

    Raises `KvPoolError` where `page_rows` is no multiple of 64.
    """
    check_page_rows(page_rows)
    return (config.num_layers, pages, config.num_kv_heads, page_rows, config.head_dim)


def pool_bytes(config: ModelConfig, dtype: str, pages: int, page_rows: int) -> int:
    """Bytes of a pool's keys and values of type `dtype`, the scratch page's among them."""
    return 2 * math.prod(pool_shape(config, pages, page_rows)) * jnp.dtype(dtype).itemsize


def check_page_rows(page_rows: int) -> None:
    """Raise `KvPoolError` for pages that attention cannot read: a page needs a positive multiple of 64
    rows."""
    if page_rows < TILE or page_rows % TILE:
        raise KvPoolError(f"pages of {page_rows} rows: expected a positive multiple of {TILE}")
