"""Masked logits on Hopper: the kernel reduces tiles of ids, a small epilogue merges them."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.pallas.hopper import STRIP
from jdllm.pallas.masked_logits.kernel import head_partials
from jdllm.pallas.masked_logits.limits import check_mosaic_gpu
from jdllm.pallas.masked_logits.reduction import LOWEST, NO_ID, NOTHING, Moments, Partials
from jdllm.pallas.masked_logits.row_table import divisors, row_table
from jdllm.pallas.masked_logits.tiles import Tiles, default_tiles
from jdllm.pallas.masked_logits.types import Level, RowDecision, RowSampling

PerRow = Float[Array, " rows"]


def masked_logits_mosaic_gpu(
    hidden: Float[Array, "rows d"],
    head: Float[Array, "vocab d"],
    rows: RowSampling,
    level: Level,
    *,
    count: Int[Array, ""] | int | None = None,
    tiles: Tiles | None = None,
) -> RowDecision:
    """Hopper form of `jdllm.pallas.masked_logits.masked_logits`, without an array of rows x vocabulary.

    Products are accumulated in f32. `negative_entropy` is the sum of p ln(p), which is below that of
    p ln(p + 1e-10) by less than 1e-10 times the size of the vocabulary.

    Arguments:
    - `tiles`: the cut; by default one chosen by the number of rows.

    Raises `NotImplementedError` where `check_mosaic_gpu` does.
    """
    check_mosaic_gpu(hidden, head, level)
    number, vocab = len(hidden), len(head)
    tiles = tiles or default_tiles(number)
    live = jnp.clip(jnp.asarray(number if count is None else count, jnp.int32), 0, number)
    hidden = jnp.pad(hidden, ((0, -number % STRIP), (0, 0)))
    table = row_table(rows, live, vocab, tiles)
    token_bans = rows.token_bans.shape[1]
    results = head_partials(hidden, head, live, table, token_bans, tiles, level)
    partials, moments = jax.tree.map(lambda x: x[:, :number], results)
    return _merge(partials, moments, rows)


def _merge(partials: Partials, moments: Moments | None, rows: RowSampling) -> RowDecision:
    """The decision over all ids from what was kept of each tile of them."""
    divisor = divisors(rows)
    best = partials.score == partials.score.max(axis=0)
    token = jnp.where(best, partials.token, NO_ID).min(axis=0)
    logit = jnp.where(partials.token == token, partials.logit, -jnp.inf).max(axis=0)
    maximum = (partials.maximum / divisor).max(axis=0)
    total = (partials.total * jnp.exp(_below(partials, divisor, maximum))).sum(axis=0)
    second = negative_entropy = jnp.zeros_like(maximum)
    if moments is not None:
        # As in the portable form: what a lower level gives must not depend on this one in the last bit.
        partials, maximum, total = lax.optimization_barrier((partials, maximum, total))
        second, negative_entropy = _moments(partials, moments, divisor, maximum, total)
    return RowDecision(token, logit / divisor, maximum, total, second, negative_entropy)


def _below(partials: Partials, divisor: PerRow, maximum: PerRow) -> Float[Array, "splits rows"]:
    """The difference between each tile's largest measured logit and that of all ids."""
    return jnp.maximum(partials.maximum / divisor - maximum, NOTHING)


def _moments(
    partials: Partials, moments: Moments, divisor: PerRow, maximum: PerRow, total: PerRow
) -> tuple[PerRow, PerRow]:
    """The second largest measured logit, and the negative entropy."""
    maxima = partials.maximum / divisor
    top = maxima == maximum
    second = jnp.where(top, moments.second / divisor, maxima).max(axis=0)
    second = jnp.where(top.sum(axis=0) > 1, maximum, second)
    below = _below(partials, divisor, maximum)
    weighted = moments.weighted * math.log(2) + below * partials.total
    negative_entropy = (weighted * jnp.exp(below)).sum(axis=0) / total - jnp.log(total)
    return jnp.where(second > LOWEST, second, -jnp.inf), negative_entropy
