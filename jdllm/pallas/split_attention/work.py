"""How the keys of all requests are shared out between workers.

The tiles of all key-value heads and requests lie on one line, head by head and within a head in the order of
the table. Each worker takes an equal run of them. A run is cut where it leaves a pair of head and request;
what a worker finds of one pair is a piece, number worker + pair. Along the line at least one of the two grows
from piece to piece, and within a pair the worker by one, so that a pair's pieces are side by side.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.pallas.hopper import STRIP, padded_rows
from jdllm.pallas.split_attention.tiles import TILE, Tiles

Scalar = Int[Array, ""]


def tile_rows(queries: int, group: int) -> int:
    """Rows that are loaded of a request's queries of `group` heads, in whole blocks of shared memory.

    Heads of several queries are padded one by one. Those of a single query lie side by side, and are loaded
    with what makes up whole blocks before and after them, since copies start at multiples of a block's rows.
    """
    if queries > 1:
        return padded_rows(queries) * group
    return padded_rows(STRIP - math.gcd(group, STRIP) + group)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of one launch; several queries are padded to whole blocks of shared memory."""

    requests: int
    queries: int
    kv_heads: int
    group: int
    head_dim: int
    pages: int
    page_rows: int

    @property
    def pairs(self) -> int:
        return self.requests * self.kv_heads

    @property
    def rows(self) -> int:
        """Folded rows of a pair: the queries of the group's first head, then those of the next."""
        return self.group * self.queries

    @property
    def single(self) -> bool:
        """Whether a request has one query, so that its heads lie side by side."""
        return self.queries == 1

    @property
    def tile_rows(self) -> int:
        return tile_rows(self.queries, self.group)

    def first_head(self, request: Scalar, head: Scalar) -> Scalar:
        """The row of a pair's first query head among those of all single queries."""
        return (request * self.kv_heads + head) * self.group

    @property
    def page_tiles(self) -> int:
        return self.page_rows // TILE

    def pieces(self, tiles: Tiles) -> int:
        """Room for what all workers find."""
        return (tiles.workers + self.pairs) * tiles.key_groups


class Partials(NamedTuple):
    """What is known of each piece; unspecified for pieces that no worker has.

    - `o`: the sum of 2^(score - m) times values, f32.
    - `m`: the largest score times log2(e); `LOWEST` times some factor where there was none.
    - `l`: the sum of 2^(score - m).
    """

    o: Float[Array, "pieces rows head_dim"]
    m: Float[Array, "pieces rows"]
    l: Float[Array, "pieces rows"]  # noqa: E741


class Share(NamedTuple):
    """Who takes which tiles of the line: the workers' numbers differ by one at most.

    - `head_tiles`: tiles of one head, of all requests together.
    - `tiles`: those of all heads.
    - `workers`: those with anything to do.
    """

    head_tiles: Scalar
    tiles: Scalar
    workers: Scalar

    def begin(self, worker: Scalar) -> Scalar:
        """The first tile of a worker, and where the one before ends; all workers beyond have nothing."""
        return lax.div(jnp.minimum(worker, self.workers) * self.tiles, self.workers)

    def worker_of(self, tile: Scalar) -> Scalar:
        return lax.div((tile + 1) * self.workers - 1, jnp.maximum(self.tiles, 1))


def share_of(first: Any, shape: Shape, tiles: Tiles) -> Share:
    """Share out the tiles of `first`, a reference to the table's.

    Workers keep step (`in_step`); where a pair has many, all are at work nevertheless if the busiest would
    otherwise have half as much to do again.
    """
    head_tiles = first[shape.requests] * shape.page_tiles
    total = head_tiles * shape.kv_heads
    most = in_step(tiles.workers, shape.pairs)
    if _has_many(most, shape):
        slower = 2 * _most_steps(total, most, tiles) >= 3 * _most_steps(total, tiles.workers, tiles)
        most = jnp.where(slower, tiles.workers, most)
    return Share(head_tiles, total, jnp.clip(lax.div(total, jnp.int32(tiles.min_tiles)), 1, most))


def in_step(workers: int, pairs: int) -> int:
    """As many workers on each pair, where that leaves few idle, else all.

    Then each has one piece of requests of equal length, and those that read the same pages, whose heads lie
    side by side, read them at the same time.
    """
    whole = workers // pairs * pairs
    return whole if 16 * whole >= 15 * workers else workers


def _has_many(workers: int, shape: Shape) -> bool:
    """Whether a pair has so many workers that two pieces more of it are few."""
    return workers >= 8 * shape.pairs


def _most_steps(total: Scalar, workers: int, tiles: Tiles) -> Scalar:
    """Steps of the busiest of so many workers."""
    most_tiles = lax.div(total + (workers - 1), jnp.int32(workers))
    return lax.div(most_tiles + (tiles.step_tiles - 1), jnp.int32(tiles.step_tiles))


def usual_pieces(shape: Shape, tiles: Tiles) -> int:
    """At most so many pieces has each of equal pairs, where all workers are at work; others may have more.

    Either its own workers find them, or those that have nothing else and one at each end.
    """
    workers = in_step(tiles.workers, shape.pairs)
    ends = 2 if workers % shape.pairs or _has_many(workers, shape) else 0
    return (workers // shape.pairs + ends) * tiles.key_groups


class Piece(NamedTuple):
    """Tiles [begin, end) of one head that belong to one request; empty where begin >= end."""

    pair: Scalar
    head: Scalar
    request: Scalar
    begin: Scalar
    end: Scalar


def pair_of(tile: Scalar, share: Share, first: Any, shape: Shape) -> Scalar:
    """The pair that a tile of the line belongs to."""
    head_tiles = jnp.maximum(share.head_tiles, 1)
    entry = lax.div(lax.rem(tile, head_tiles), jnp.int32(shape.page_tiles))
    request = jnp.int32(0)
    for bit in reversed(range((shape.requests - 1).bit_length())):
        middle = request + (1 << bit)
        inside = (middle < shape.requests) & (first[jnp.minimum(middle, shape.requests)] <= entry)
        request = jnp.where(inside, middle, request)
    return lax.div(tile, head_tiles) * shape.requests + request


def piece_of(pair: Scalar, begin: Scalar, end: Scalar, share: Share, first: Any, shape: Shape) -> Piece:
    """What the tiles [begin, end) of the line have of a pair."""
    head = lax.div(pair, jnp.int32(shape.requests))
    request = lax.rem(pair, jnp.int32(shape.requests))
    before = head * share.head_tiles
    return Piece(
        pair,
        head,
        request,
        jnp.maximum(begin - before, first[request] * shape.page_tiles),
        jnp.minimum(end - before, first[request + 1] * shape.page_tiles),
    )
