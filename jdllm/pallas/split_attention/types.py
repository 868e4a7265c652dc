"""The contract of Split-S attention."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor

Queries = Float[Array, "requests queries heads head_dim"]
Pool = Float[Array, "layers pages kv_heads page_rows head_dim"]


class PageTable(NamedTuple):
    """Which rows of the pool each request sees, in compressed sparse rows.

    Request r sees the entries [first[r], first[r + 1]): those of all its segments, one after another.

    - `pages`: int32, the page of each entry; from `first[-1]` on nothing is read.
    - `valid`: int32, how many rows of that page are live, from its first on; 0 to all of them, anywhere.
    - `first`: int32, rising from 0; known on the device only.
    """

    pages: Int[Tensor, " entries"]
    valid: Int[Tensor, " entries"]
    first: Int[Tensor, " requests+1"]


def dense_table(lengths: Int[Tensor, " requests"], pages_per_request: int, page_rows: int) -> PageTable:
    """The table of a store in which request r owns the pages from r * pages_per_request on.

    Arguments:
    - `lengths`: int32 rows that are live, at most pages_per_request * page_rows; they fill a request's pages
      in order.
    - `pages_per_request`, `page_rows`: the store's shape. A store with one run of rows for each head is a
      pool of one page per request.

    Returns a table with room for all pages, of which those with live rows come first.
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    requests = lengths.shape[0]
    used = -(-lengths // page_rows)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(used, dtype=jnp.int32)])
    entry = jnp.arange(requests * pages_per_request, dtype=jnp.int32)
    request = request_of(entry, first)
    page = entry - first[request]
    valid = jnp.clip(lengths[request] - page * page_rows, 0, page_rows)
    return PageTable(request * pages_per_request + jnp.minimum(page, pages_per_request - 1), valid, first)


def request_of(entry: Int[Array, "..."], first: Int[Tensor, " requests+1"]) -> Int[Array, "..."]:
    """The request that owns each entry; the last one for entries that nobody owns."""
    first = jnp.asarray(first)
    request = jnp.searchsorted(first[1:], entry, side="right")
    return jnp.minimum(request, first.shape[0] - 2).astype(jnp.int32)
