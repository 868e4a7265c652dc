"""Which rows of a refresh go into the KV pool, chosen layer by layer.

A row is worth keeping if the block that is being denoised looks at it: its keys are scored with the block's
mean query. Sources: Sparse-dLLM (one score for all heads) and dLLM-Serve (one for each key-value head).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jdllm.arrays import Tensor
from jdllm.execution.paged.pool import KvArrays
from jdllm.models.cards import of_copies, summed
from jdllm.models.config import ModelConfig
from jdllm.models.layer import LayerNumber
from jdllm.pallas.split_attention import PageTable
from jdllm.stored_rows import Float8Rows, as_stored

Queries = Float[Array, "rows heads head_dim"]
QueriesOf = Queries | Callable[[Int[Array, " some"]], Queries]
"""Queries of all packed rows, or what makes those of some rows."""
Keys = Float[Array, "rows kv_heads head_dim"]
Pool = Float[Array, "layers pages kv_heads page_rows head_dim"] | Float8Rows
Order = Int32[Array, "kv_heads candidates"]
Sources = Int32[Array, "entries #kv_heads page_rows"]

USUAL_BLOCK = 32
"""Rows of a block of the usual length at most: the host need not wait while their queries are added."""

USUAL_WIDTH = 15
"""Candidates of a max pool of the usual width at most: few passes find their maximum."""


class Selection(NamedTuple):
    """Which rows a refresh may store, and how many of them.

    - `block_first`, `block_rows`: the packed rows of each segment's current block.
    - `row`: packed rows that may be stored, by rising segment, in each by rising position; padding is last.
    - `segment`: the segment of each candidate; `segments` for padding.
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
    keep: Int[Tensor, " segments"]
    scored: Bool[Tensor, " segments"]
    per_head: Bool[Tensor, " segments"]
    width: Int[Tensor, " segments"]

    @property
    def owner(self) -> Int[Array, " candidates"]:
        """`segment`, with the last one for padding."""
        return jnp.minimum(self.segment, self.keep.size - 1)


class Slots(NamedTuple):
    """What the slots of a page table take, as far as it is the same in every layer.

    - `page`: the page that each entry is written to; beyond any pool, and no two the same, where it is none.
    - `place`: where in the candidates' order a slot's row is. Slots beyond the kept candidates repeat the
      last one.
    - `source`: the packed row of each slot, if the slots have the order of the candidates.
    """

    page: Int32[Array, " entries"]
    place: Int32[Array, "entries page_rows"]
    source: Int32[Array, "entries 1 page_rows"]


def slots_of(selection: Selection, table: PageTable, page_rows: int) -> Slots:
    """Lay out what each segment keeps: rank r in slot `r % page_rows` of its page `r // page_rows`.

    Arguments:
    - `table`: the pages of each segment, with room for the candidates that it keeps.
    - `page_rows`: rows of a page.

    Entries that nobody owns, and those beyond what their segment keeps, are not written.
    """
    selection = Selection(*map(jnp.asarray, selection))
    pages, first = jnp.asarray(table.pages), jnp.asarray(table.first)
    segments, entry = selection.keep.size, jnp.arange(pages.size)
    # The default method is a device loop that waits for the host.
    owner = jnp.searchsorted(first[1:], entry, side="right", method="compare_all")
    begin = jnp.searchsorted(selection.segment, jnp.arange(segments), method="compare_all")
    segment = jnp.minimum(owner, segments - 1)
    rank = (entry - first[segment])[:, None] * page_rows + jnp.arange(page_rows)
    keep = selection.keep[segment][:, None]
    used = (owner < segments)[:, None] & (rank[:, :1] < keep)
    place = jnp.where(used, begin[segment][:, None] + jnp.minimum(rank, keep - 1), 0).astype(jnp.int32)
    page = jnp.where(used[:, 0], pages, jnp.iinfo(jnp.int32).max - entry).astype(jnp.int32)
    return Slots(page, place, selection.row[place][:, None].astype(jnp.int32))


def sources(
    q: QueriesOf,
    k: Keys,
    selection: Selection,
    slots: Slots,
    *,
    scored: bool,
    usual: bool = False,
    cards: int = 1,
    copies: int = 1,
) -> Sources:
    """The packed row that each slot takes, for each key-value head.

    Arguments:
    - `q`, `k`: rotated.
    - `slots`: as `slots_of` returns them.
    - `scored`: whether any segment may be scored, static; queries and keys are not read otherwise.
    - `usual`: whether every scored segment has a block of at most `USUAL_BLOCK` rows, and a width of at most
      `USUAL_WIDTH`; static.
    - `cards`, `copies`: of the configuration, how many have a part of the heads, and the same keys; static.

    Returns int32 rows, with one head for all where they are the same.
    """
    if not scored:
        return slots.source
    order = candidate_order(q, k, selection, usual=usual, cards=cards, copies=copies)
    return jnp.moveaxis(jnp.asarray(selection.row)[order[:, slots.place]], 0, 1).astype(jnp.int32)


def candidate_order(
    q: QueriesOf, k: Keys, selection: Selection, *, usual: bool = False, cards: int = 1, copies: int = 1
) -> Order:
    """The candidates in the order in which each segment keeps them, for each key-value head.

    Scores are products of keys with the mean query of all rows of the segment's block, masked or not, in f32:
    their mean over all query heads, or their maximum over the query heads of a group. A candidate counts as
    much as the best one in its max pool; of equal ones the first is kept. Candidates of segments that are not
    scored stay in order. The order within a segment does not depend on the others in the batch.

    Arguments:
    - `q`, `k`: rotated.
    - `usual`: whether every scored segment has a block of at most `USUAL_BLOCK` rows, and a width of at most
      `USUAL_WIDTH`; static.
    - `cards`, `copies`: of the configuration, how many have a part of the heads, and the same keys; static.

    Returns int32 indices into the candidates, by rising segment; padding is last.
    """
    selection = Selection(*map(jnp.asarray, selection))
    scores = _scores(q, k, selection, usual=usual, cards=cards, copies=copies)
    scores = _pooled(scores, selection, usual=usual)
    index = jnp.arange(scores.shape[1], dtype=jnp.int32)
    segment, index = (jnp.broadcast_to(x, scores.shape) for x in (selection.segment, index))
    return lax.sort((segment, -scores, index), num_keys=3)[2]


def store(
    pool_k: Pool,
    pool_v: Pool,
    layer: Int[Array, ""] | int,
    k: Keys,
    v: Keys,
    page: Int32[Array, " entries"],
    source: Sources,
) -> tuple[Pool, Pool]:
    """Write keys and values into whole pages of the pool of one layer.

    Arguments:
    - `pool_k`, `pool_v`: written in place where the caller donates or carries them.
    - `layer`: which layer of the pools.
    - `k`, `v`: rotated keys, and values, of all packed rows.
    - `page`: the page of each entry; beyond the pool for an entry that is not written.
    - `source`: as `sources` returns it.

    Returns both pools.
    """
    head = jnp.arange(k.shape[1])[:, None]
    # Only a scatter of unique indices is plain stores; others exchange and compare every element.
    k, v = (rows.at[source, head].get(mode="promise_in_bounds") for rows in (k, v))
    return jax.tree.map(
        lambda x, rows: x.at[layer, page].set(rows, mode="drop", unique_indices=True),
        (pool_k, pool_v),
        (as_stored(pool_k, k), as_stored(pool_v, v)),
    )


class Storing(NamedTuple):
    """Which rows a refresh stores, the same in all layers.

    - `selection`, `slots`: which rows may be stored, and in which slots.
    - `scored`: whether any segment keeps its best candidates; static. Queries are not read otherwise.
    - `usual`: whether all these have blocks and max pools of the usual sizes (`USUAL_BLOCK`, `USUAL_WIDTH`);
      static.
    """

    selection: Selection
    slots: Slots
    scored: bool
    usual: bool

    def write(
        self, pool: KvArrays, part: ModelConfig, layer: LayerNumber, q: QueriesOf, k: Keys, v: Keys
    ) -> KvArrays:
        """Write the rows that a layer selects; returns the pool.

        Arguments:
        - `pool`: written in place where the caller donates or carries it.
        - `part`: the model; on several cards the part of each.
        - `layer`: which layer of the pool.
        - `q`, `k`, `v`: of the heads of this part; queries and keys are rotated.
        """
        source = sources(
            q,
            k,
            self.selection,
            self.slots,
            scored=self.scored,
            usual=self.usual,
            cards=part.cards,
            copies=part.kv_copies,
        )
        return KvArrays(*store(*pool, layer, k, v, self.slots.page, source))


def _mean_queries(
    q: QueriesOf, rows: int, selection: Selection, *, usual: bool
) -> Float32[Array, "segments heads head_dim"]:
    """The mean query of each segment's block.

    Rows are added one after the other: the sum is the same in any company, which scattered additions on a GPU
    are not. A loop whose turns the device counts waits for the host in every layer, so that there is none
    where all segments are usual.
    """
    count = selection.block_rows

    def block_row(place: Int[Array, ""] | int) -> Int[Array, " segments"]:
        return jnp.minimum(selection.block_first + place, rows - 1)

    def queries(first: Int[Array, ""] | int) -> Callable[[int], Array]:
        """What returns each segment's query at a place of the block behind `first`."""
        if not callable(q):
            every = jnp.asarray(q)
            return lambda offset: every[block_row(first + offset)]
        places = jnp.concatenate([block_row(first + offset) for offset in range(USUAL_BLOCK)])
        found = q(places)
        return found.reshape(USUAL_BLOCK, count.size, *found.shape[1:]).__getitem__

    def add(turn: Int[Array, ""] | int, total: Array | int) -> Array:
        first = turn * USUAL_BLOCK
        of_place = queries(first)
        for offset in range(USUAL_BLOCK):
            inside = (first + offset < count)[:, None, None]
            total += jnp.where(inside, of_place(offset).astype(jnp.float32), 0)
        return jnp.asarray(total)

    total = add(0, 0)
    if not usual:
        total = lax.fori_loop(1, -(-count.max() // USUAL_BLOCK), add, total)
    return total / jnp.maximum(count, 1)[:, None, None]


def _scores(
    q: QueriesOf, k: Keys, selection: Selection, *, usual: bool, cards: int, copies: int
) -> Float32[Array, "kv_heads candidates"]:
    """What each candidate is worth before pooling; 0 in segments that are not scored."""
    owner = selection.owner
    query = _mean_queries(q, len(k), selection, usual=usual)
    query = query.reshape(selection.keep.size, k.shape[1], -1, k.shape[2])
    # A product and a sum fuse with both gathers; a matrix product would be given the gathered queries.
    products = query[owner] * k[selection.row][:, :, None]
    scores = products.sum(axis=-1)
    shared = summed(scores.mean(axis=(1, 2)), cards)[:, None] / cards
    of_group = of_copies(scores.max(axis=-1), copies).max(axis=0)
    scores = jnp.where(selection.per_head[owner][:, None], of_group, shared)
    return jnp.where(selection.scored[owner][:, None], scores, 0).T


def _pooled(
    scores: Float32[Array, "kv_heads candidates"], selection: Selection, *, usual: bool
) -> Float32[Array, "kv_heads candidates"]:
    """The maximum over the candidates of the same segment that lie within half its width.

    Two spans of 1, 2, 4, ... candidates cover any span. How many such lengths there are depends on the
    candidates alone, or on the largest usual width, so that one executable serves every width up to these.
    """
    segments, candidates = selection.keep.size, selection.segment.size
    begin = jnp.searchsorted(selection.segment, jnp.arange(segments + 1), method="compare_all")
    owner, index = selection.owner, jnp.arange(candidates)
    half = selection.width[owner] // 2
    first = jnp.maximum(begin[owner], index - half)
    stop = jnp.minimum(begin[owner + 1], index + half + 1)
    from_each = pooled = scores
    length, widest = 1, min(candidates, USUAL_WIDTH) if usual else candidates
    while 2 * length <= widest:
        # From now on the maximum over `2 * length` candidates, or as many as there are, from each one on.
        following = jnp.concatenate([from_each[:, length:], from_each[:, -length:]], axis=1)
        from_each, length = jnp.maximum(from_each, following), 2 * length
        covered = jnp.maximum(from_each[:, first], from_each[:, jnp.maximum(stop - length, 0)])
        pooled = jnp.where(stop - first >= length, covered, pooled)
    return pooled
