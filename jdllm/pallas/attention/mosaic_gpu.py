"""Packed attention on Hopper, with a kernel of our own."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jdllm.pallas.attention.kernel import BLOCK_ROWS, Ranges, Tiles, attend
from jdllm.pallas.attention.types import AttentionOutput, Bounds, Keys, Queries


def attention_mosaic_gpu(
    q: Queries, k: Keys, v: Keys, k_start: Bounds, k_end: Bounds, *, scale: float, tiles: Tiles | None = None
) -> AttentionOutput:
    """Mosaic GPU form of `jdllm.pallas.attention.attention`: blocks of keys that no row sees are skipped.

    Arguments:
    - `tiles`: how the keys are cut; by default what is fastest on an H200.
    """
    rows = q.shape[0]
    ranges = row_ranges(jnp.asarray(k_start, jnp.int32), jnp.asarray(k_end, jnp.int32), k.shape[0])
    o, m, l = attend(q, k, v, ranges, scale, tiles or Tiles())  # noqa: E741
    return AttentionOutput(o, m[:, :rows].T, l[:, :rows].T)


def row_ranges(start: Int[Array, " rows"], end: Int[Array, " rows"], keys: int) -> Ranges:
    """The ranges as the kernel reads them."""
    end = jnp.minimum(end, keys)
    seen = start < end
    padding = (0, -len(start) % BLOCK_ROWS)
    start, end = (jnp.pad(jnp.where(seen, bound, 0), padding) for bound in (start, end))
    start_blocks, end_blocks = (bound.reshape(-1, BLOCK_ROWS) for bound in (start, end))
    lowest = jnp.where(start_blocks < end_blocks, start_blocks, keys).min(axis=1)
    highest_end = end_blocks.max(axis=1)
    blocks = [jnp.minimum(lowest, highest_end), start_blocks.max(axis=1), end_blocks.min(axis=1), highest_end]
    return Ranges(jnp.stack([start, end]), jnp.stack(blocks))
