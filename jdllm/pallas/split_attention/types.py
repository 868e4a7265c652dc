"""The contract of Split-S attention."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor
from jdllm.pallas.hopper import STRIP
from jdllm.stored_rows import Float8Rows, rows_at

Queries = Float[Array, "requests queries heads head_dim"]
PlainPool = Float[Array, "layers pages kv_heads page_rows head_dim"]
Pool = PlainPool | Float8Rows
Fresh = Float[Array, "fresh_rows kv_heads head_dim"]

FRESH_UNIT = STRIP
"""Fresh rows of an entry usually begin at a multiple of this."""


class PageTable(NamedTuple):
    """Which rows of the pool, and which fresh ones, each request sees, in compressed sparse rows.

    Request r sees the entries [first[r], first[r + 1]): those of all its segments, one after another.

    - `pages`: int32, the page of each entry; ~n, which is below 0, for fresh rows from `fresh_unit` * n on,
      as many as a page has. From `first[-1]` on nothing is read.
    - `valid`: int32, how many rows of an entry are live, from its first on; 0 to all of them, anywhere.
    - `first`: int32, rising from 0; known on the device only.
    """

    pages: Int[Tensor, " entries"]
    valid: Int[Tensor, " entries"]
    first: Int[Tensor, " requests+1"]


def gathered(
    pool: Pool,
    fresh: Fresh | None,
    layer: Int[Array, ""] | int,
    pages: Int[Array, " entries"],
    fresh_unit: int,
    dtype: jnp.dtype,
) -> Float[Array, "entries kv_heads page_rows head_dim"]:
    """The rows of some entries of a table; those of an entry that lie beyond the last fresh row repeat it.

    Arguments:
    - `dtype`: the type in which rows are returned that are stored in 8 bits.
    """
    stored = rows_at(pool, (layer, jnp.maximum(pages, 0)), dtype)
    if fresh is None:
        return stored
    row = fresh_unit * ~pages[:, None] + jnp.arange(pool.shape[3])
    rows = jnp.moveaxis(fresh[jnp.clip(row, 0, fresh.shape[0] - 1)], 1, 2)
    return jnp.where((pages < 0)[:, None, None, None], rows, stored)


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


def fresh_unit_of(tile_rows: int) -> int:
    """The `fresh_unit` of requests of which fresh rows begin where queries of a request begin.

    Arguments:
    - `tile_rows`: queries of a request.
    """
    return FRESH_UNIT if FRESH_UNIT % tile_rows else tile_rows


def with_fresh_rows(
    table: PageTable,
    start: Int[np.ndarray, " runs"],
    count: Int[np.ndarray, " runs"],
    page_rows: int,
    owner: Int[np.ndarray, " runs"] | None = None,
    unit: int = FRESH_UNIT,
) -> PageTable:
    """A table on the host, in which requests see runs of fresh rows after their pages.

    Arguments:
    - `start`: the first fresh row of each run, a multiple of `unit`.
    - `count`: how many rows a run has from there on.
    - `page_rows`: rows of an entry.
    - `owner`: the request that sees each run, rising; by default there is a run for each request.
    - `unit`: the `fresh_unit` of `split_attention`. An entry has no more fresh rows where it is less than
      `FRESH_UNIT`.

    Raises `ValueError` where a run begins elsewhere.
    """
    start, count, (pages, valid, first) = np.asarray(start), np.asarray(count), map(np.asarray, table)
    if (start % unit).any():
        raise ValueError(f"fresh rows begin at multiples of {unit}, not at {start}")
    page_rows = page_rows if unit == FRESH_UNIT else unit
    entries = -(-count // page_rows)
    run = np.repeat(np.arange(len(entries)), entries)
    skipped = (np.arange(len(run)) - (np.cumsum(entries) - entries)[run]) * page_rows
    requests = run if owner is None else np.asarray(owner)[run]
    place = first[1:][requests]
    before = np.insert(np.cumsum(np.bincount(requests, minlength=len(first) - 1)), 0, 0)
    return PageTable(
        np.insert(pages, place, ~((start[run] + skipped) // unit)).astype(np.int32),
        np.insert(valid, place, np.minimum(count[run] - skipped, page_rows)).astype(np.int32),
        (first + before).astype(np.int32),
    )


def request_of(entry: Int[Array, "..."], first: Int[Tensor, " requests+1"]) -> Int[Array, "..."]:
    """The request that owns each entry; the last one for entries that nobody owns."""
    first = jnp.asarray(first)
    # By halving it would be a loop on the device, with copies in each turn.
    request = jnp.searchsorted(first[1:], entry, side="right", method="compare_all")
    return jnp.minimum(request, first.shape[0] - 2).astype(jnp.int32)
