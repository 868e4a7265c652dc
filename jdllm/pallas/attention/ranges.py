"""Which keys packed rows see, as the Hopper kernel reads it."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jdllm.pallas.attention.types import Bounds
from jdllm.pallas.hopper import STRIP, WARPGROUP_ROWS

CONSUMERS = 2
"""Warpgroups of a block that take 64 rows each."""

BLOCK_ROWS = CONSUMERS * WARPGROUP_ROWS
CLUSTER = 2
"""Blocks that share keys and values."""

CLUSTER_ROWS = CLUSTER * BLOCK_ROWS


class Ranges(NamedTuple):
    """Which keys the rows see, padded to whole clusters; inside the kernel, references.

    - `rows`: the first key of each row, and the one after its last.
    - `clusters`: for each cluster's rows the lowest first key, rounded down to a multiple of 8, the highest
      first key, the lowest end and the highest end; rows that see nothing count in the second and third only,
      as an empty range at 0.
    """

    rows: Int[Array, "2 padded_rows"]
    clusters: Int[Array, "4 clusters"]


def ranges_of(k_start: Bounds, k_end: Bounds, keys: int) -> Ranges:
    """The ranges of rows that see the keys [k_start, k_end) of `keys`."""
    start, end = jnp.asarray(k_start, jnp.int32), jnp.minimum(jnp.asarray(k_end, jnp.int32), keys)
    seen = start < end
    padding = (0, -len(start) % CLUSTER_ROWS)
    start, end = (jnp.pad(jnp.where(seen, bound, 0), padding) for bound in (start, end))
    starts, ends = (bound.reshape(-1, CLUSTER_ROWS) for bound in (start, end))
    lowest = jnp.where(starts < ends, starts, keys).min(axis=1)
    highest_end = ends.max(axis=1)
    first = jnp.minimum(lowest, highest_end) // STRIP * STRIP
    return Ranges(
        jnp.stack([start, end]), jnp.stack([first, starts.max(axis=1), ends.min(axis=1), highest_end])
    )
