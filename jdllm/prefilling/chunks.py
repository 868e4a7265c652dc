"""The first stage: a context is cut into chunks."""

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Chunk(NamedTuple):
    """A part of a context.

    - `tokens`: int32, the beginning-of-sequence token first where chunks begin with one.
    - `start`, `stop`: the tokens of the context that it was cut from.
    """

    tokens: Int[np.ndarray, " length"]
    start: int
    stop: int


def cut(
    context: Int[np.ndarray, " tokens"], length: int, bos_id: int | None, *, from_tail: bool = False
) -> list[Chunk]:
    """Cut a context every `length` tokens.

    Arguments:
    - `bos_id`: begins every chunk. A full chunk that does not begin with it anyway loses its last token for
      it; a short one grows by one. With `None` chunks stay as they were cut.
    - `from_tail`: the first chunk is the short one, not the last.

    Returns the chunks in order; none of an empty context. Exact: as published.
    """
    first = len(context) % length if from_tail else 0
    bounds = [0, *range(first or length, len(context), length), len(context)]
    return [
        Chunk(_with_bos(context[start:stop], length, bos_id), start, stop)
        for start, stop in itertools.pairwise(bounds)
        if start < stop
    ]


def _with_bos(
    tokens: Int[np.ndarray, " tokens"], length: int, bos_id: int | None
) -> Int[np.ndarray, " length"]:
    if bos_id is None or tokens[0] == bos_id:
        return tokens.astype(np.int32)
    return np.concatenate([[bos_id], tokens])[:length].astype(np.int32)
