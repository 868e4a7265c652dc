"""Which of the evaluated rows commit their token in this step."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor


def select_top(
    confidence: Float[Array, " rows"],
    candidate: Bool[Array, " rows"],
    segment: Int[Tensor, " rows"],
    quota: Int[Tensor, " segments"],
) -> Bool[Array, " rows"]:
    """The `quota` most confident candidates of each segment; equal confidences go to the lowest row.

    Arguments:
    - `confidence`: higher commits first; not NaN.
    - `candidate`: rows that may commit.
    - `segment`: the segment of each row, in [0, segments) for candidates.
    - `quota`: how many rows of each segment commit; all candidates where there are fewer.

    Returns the rows that commit.
    """
    rows, segments = confidence.shape[0], quota.shape[0]
    group = jnp.where(candidate, segment, segments)
    order = jnp.arange(rows)
    group, _, order = lax.sort((group, -confidence, order), num_keys=3)
    first = jnp.searchsorted(group, jnp.arange(segments + 1))
    rank = jnp.arange(rows) - first[group]
    quota = jnp.append(quota, 0)
    return jnp.zeros(rows, bool).at[order].set(rank < quota[group])
