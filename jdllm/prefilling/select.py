"""Which chunks are kept, and which tokens inside a chunk: on the host, from what the device measured."""

import numpy as np
from jaxtyping import Float, Int


def best_chunks(
    scores: Float[np.ndarray, " chunks"], count: int, *, keep_first: bool = False
) -> Int[np.ndarray, " kept"]:
    """The chunks with the highest scores, in the order of the document; of equal ones the earlier.

    Arguments:
    - `scores`: scores that are not finite are the lowest.
    - `count`: how many are kept; all where there are no more.
    - `keep_first`: keep the first chunk and so many others.
    """
    scores = np.where(np.isfinite(scores), scores, -np.inf)
    order = np.argsort(-scores, kind="stable")
    if keep_first:
        order = np.concatenate([order[order == 0], order[order != 0]])
        count += 1
    return np.sort(order[:count])


def best_tokens(
    values: Float[np.ndarray, "*of tokens"], count: int, *, lowest: bool = False, keep_first: bool = True
) -> Int[np.ndarray, "*of kept"]:
    """The tokens with the highest values, rising; of equal ones the earlier.

    Arguments:
    - `values`: of the tokens of a chunk, for any number of lists that are made at once.
    - `count`: how many are kept; all where there are no more.
    - `lowest`: keep the lowest instead.
    - `keep_first`: keep the first token in any case; it counts.
    """
    ranked = values if lowest else -values
    if keep_first:
        ranked = np.concatenate([np.full_like(ranked[..., :1], -np.inf), ranked[..., 1:]], axis=-1)
    order = np.argsort(ranked, axis=-1, kind="stable")
    return np.sort(order[..., :count], axis=-1)
