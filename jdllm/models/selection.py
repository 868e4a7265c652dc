"""Which rows of a refresh go into the KV pool, chosen layer by layer.

A row is worth keeping if the block that is being denoised looks at it: its keys are scored with the block's
mean query. Sources: Sparse-dLLM (one score for all heads) and dLLM-Serve (one for each key-value head).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jdllm.arrays import Tensor
from jdllm.models.pool import SCRATCH_PAGE
from jdllm.pallas.split_attention import PageTable

Queries = Float[Array, "rows heads head_dim"]
Keys = Float[Array, "rows kv_heads head_dim"]
Pool = Float[Array, "layers pages kv_heads page_rows head_dim"]
PerHead = Int32[Array, "candidates kv_heads"]

_ROWS_PER_TURN = 8


class Selection(NamedTuple):
    """Which rows a refresh may store, and how many of them.

    - `block_first`, `block_rows`: the packed rows of each segment's current block.
    - `row`: packed rows that may be stored, by rising segment, in each by rising position; padding is last.
    - `segment`: the segment of each candidate; `segments` for padding.
    - `place`: which of its segment's candidates it is; any for padding.
    - `keep`: how many candidates of each segment are kept, at most as many as it has.
    - `scored`: whether the best are kept; otherwise the first ones are.
    - `per_head`: whether each key-value head has scores of its own; otherwise all share one.
    - `width`: odd width of the max pool over a segment's candidates, 1 for none. Candidates on either side of
      the block are neighbours, as in both sources.
    """

    block_first: Int[Tensor, " segments"]
    block_rows: Int[Tensor, " segments"]
    row: Int[Tensor, " candidates"]
    segment: Int[Tensor, " candidates"]
    place: Int[Tensor, " candidates"]
    keep: Int[Tensor, " segments"]
    scored: Bool[Tensor, " segments"]
    per_head: Bool[Tensor, " segments"]
    width: Int[Tensor, " segments"]

    @property
    def owner(self) -> Int[Array, " candidates"]:
        """`segment`, with the last one for padding."""
        return jnp.minimum(self.segment, self.keep.size - 1)


class Scoring(NamedTuple):
    """What bounds the work of scoring in a batch; static.

    - `half_width`: at least the largest `width // 2`.
    - `block_rows`: at least the rows of the longest block.
    """

    half_width: int
    block_rows: int


def candidate_ranks(q: Queries, k: Keys, selection: Selection, scoring: Scoring | None) -> PerHead:
    """The order in which the candidates of each segment are kept, for each key-value head.

    Scores are products of keys with the mean query of all rows of the segment's block, masked or not, in f32:
    their mean over all query heads, or their maximum over the query heads of a group. A candidate counts as
    much as the best one in its max pool; of equal ones the first is kept. Ranks of a segment do not depend on
    the others in the batch.

    Arguments:
    - `q`, `k`: rotated.
    - `scoring`: `None` where no segment is scored: queries and keys are not read then.

    Returns int32 ranks from 0 on within each segment; those below `keep` are kept. Those of padding mean
    nothing.
    """
    selection = Selection(*map(jnp.asarray, selection))
    if scoring is None:
        return jnp.broadcast_to(selection.place[:, None], (selection.place.size, k.shape[1]))
    scores = _pooled(_scores(q, k, selection, scoring.block_rows), selection, scoring.half_width)
    return _ranks(scores, selection.segment, selection.place).T


def destinations(
    ranks: PerHead, selection: Selection, table: PageTable, page_rows: int
) -> tuple[PerHead, PerHead]:
    """Where each candidate is stored: rank r in slot `r % page_rows` of a segment's page `r // page_rows`.

    Arguments:
    - `ranks`: as `candidate_ranks` returns them.
    - `table`: the pages of each segment, with room for the candidates that it keeps.
    - `page_rows`: rows of a page.

    Returns int32 pages and slots. What is not kept, padding included, goes to slot 0 of the scratch page.
    """
    pages, first = jnp.asarray(table.pages), jnp.asarray(table.first)
    segment, keep = jnp.asarray(selection.segment), jnp.asarray(selection.keep)
    kept = (ranks < keep[selection.owner][:, None]) & (segment < keep.size)[:, None]
    page = pages[first[selection.owner][:, None] + jnp.where(kept, ranks // page_rows, 0)]
    page, slot = jnp.where(kept, page, SCRATCH_PAGE), jnp.where(kept, ranks % page_rows, 0)
    return page.astype(jnp.int32), slot.astype(jnp.int32)


def store(
    pool_k: Pool,
    pool_v: Pool,
    layer: Int[Array, ""] | int,
    k: Keys,
    v: Keys,
    selection: Selection,
    page: PerHead,
    slot: PerHead,
) -> tuple[Pool, Pool]:
    """Write the candidates' keys and values into the pool of one layer.

    Arguments:
    - `pool_k`, `pool_v`: written in place where the caller donates or carries them.
    - `layer`: which layer of the pools.
    - `k`, `v`: rotated keys, and values, of all packed rows.
    - `page`, `slot`: as `destinations` returns them.

    Returns both pools. What the scratch page then holds is not determined.
    """
    row, head = jnp.asarray(selection.row), jnp.arange(k.shape[1])
    pool_k, pool_v = (
        pool.at[layer, page, head, slot].set(rows[row].astype(pool.dtype))
        for pool, rows in ((pool_k, k), (pool_v, v))
    )
    return pool_k, pool_v


def _mean_queries(
    q: Queries, selection: Selection, block_rows: int
) -> Float32[Array, "segments heads head_dim"]:
    """The mean query of each segment's block.

    Rows are added one after the other, in as many turns as the longest block needs: the sum is the same in
    any company, which scattered additions on a GPU are not.
    """
    count = selection.block_rows

    def add(turn: Int[Array, ""], total: Array) -> Array:
        for offset in range(_ROWS_PER_TURN):
            i = turn * _ROWS_PER_TURN + offset
            row = jnp.minimum(selection.block_first + i, q.shape[0] - 1)
            total += jnp.where((i < count)[:, None, None], q[row].astype(jnp.float32), 0)
        return total

    turns = -(-block_rows // _ROWS_PER_TURN)
    total = lax.fori_loop(0, turns, add, jnp.zeros((count.size, *q.shape[1:]), jnp.float32))
    return total / jnp.maximum(count, 1)[:, None, None]


def _scores(
    q: Queries, k: Keys, selection: Selection, block_rows: int
) -> Float32[Array, "kv_heads candidates"]:
    """What each candidate is worth before pooling; 0 in segments that are not scored."""
    owner = selection.owner
    query = _mean_queries(q, selection, block_rows).reshape(selection.keep.size, k.shape[1], -1, k.shape[2])
    # A product and a sum fuse with both gathers; a matrix product would be given the gathered queries.
    products = query[owner] * k[selection.row][:, :, None]
    scores = products.sum(axis=-1)
    shared = scores.mean(axis=(1, 2))[:, None]
    scores = jnp.where(selection.per_head[owner][:, None], scores.max(axis=-1), shared)
    return jnp.where(selection.scored[owner][:, None], scores, 0).T


def _pooled(
    scores: Float32[Array, "kv_heads candidates"], selection: Selection, half_width: int
) -> Float32[Array, "kv_heads candidates"]:
    """The maximum over the candidates of the same segment that lie within half its width."""
    segment, candidates = selection.segment, selection.segment.size
    half = selection.width[selection.owner] // 2
    index = jnp.arange(candidates)
    pooled = scores
    for distance in range(1, half_width + 1):
        for neighbour in (index - distance, index + distance):
            inside = (neighbour >= 0) & (neighbour < candidates) & (distance <= half)
            neighbour = jnp.clip(neighbour, 0, candidates - 1)
            inside &= segment[neighbour] == segment
            pooled = jnp.where(inside, jnp.maximum(pooled, scores[:, neighbour]), pooled)
    return pooled


def _ranks(
    scores: Float32[Array, "kv_heads candidates"],
    segment: Int[Tensor, " candidates"],
    place: Int[Tensor, " candidates"],
) -> Int32[Array, "kv_heads candidates"]:
    """Ranks by falling score within each segment, of equal ones the first candidate first."""
    segment, index = (jnp.broadcast_to(x, scores.shape) for x in (segment, jnp.arange(scores.shape[1])))
    _, _, order = lax.sort((segment, -scores, index), num_keys=3)
    # Sorting leaves each segment where it was, so the places within it are the ranks.
    heads = jnp.arange(scores.shape[0])[:, None]
    return jnp.zeros_like(order).at[heads, order].set(place, unique_indices=True)
