"""Masked logits on Hopper: one kernel reduces tiles of ids, a small one merges them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.pallas.hopper import STRIP
from jdllm.pallas.masked_logits.kernel import head_partials
from jdllm.pallas.masked_logits.limits import check_mosaic_gpu
from jdllm.pallas.masked_logits.merge import merge_tiles
from jdllm.pallas.masked_logits.row_table import row_table
from jdllm.pallas.masked_logits.tiles import Tiles, default_tiles
from jdllm.pallas.masked_logits.types import Level, RowDecision, RowSampling


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
    partials, moments = head_partials(hidden, head, live, table, token_bans, tiles, level)
    decision = merge_tiles(partials, moments, table.words, live, len(hidden), tiles.splits(vocab))
    return jax.tree.map(lambda x: x[:number], decision)
