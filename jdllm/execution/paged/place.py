"""Rows of the pool that are written one by one."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Int

from jdllm.arrays import Tensor
from jdllm.execution.paged.pool import KvArrays
from jdllm.models.layer import LayerNumber
from jdllm.stored_rows import as_stored


class Place(NamedTuple):
    """Where the key and value of each row are stored: a row of a page, beyond the pool for nowhere."""

    page: Int[Tensor, " rows"]
    row: Int[Tensor, " rows"]


def store_rows(pool: KvArrays, layers: LayerNumber | slice, place: Place, k: Array, v: Array) -> KvArrays:
    """Write keys and values of rows, each where its place says.

    Arguments:
    - `pool`: is written in place: donate it.
    - `place`: no two rows in the same place.
    - `layers`: one, of which `k` and `v` are `[rows, kv_heads, head_dim]`, or all: `[rows, layers, ...]`.
    """
    return jax.tree.map(
        lambda x, rows: x.at[layers, place.page, :, place.row].set(rows, mode="drop", unique_indices=True),
        pool,
        KvArrays(as_stored(pool.k, k), as_stored(pool.v, v)),
    )
