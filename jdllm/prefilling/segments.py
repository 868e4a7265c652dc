"""Rows of one evaluation that is made of several sequences, and what each row sees."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

Ints = Int[np.ndarray, " rows"]


class Segment(NamedTuple):
    """Rows that see each other.

    - `tokens`, `positions`: int32 of each row.
    - `k_start`, `k_end`: the range of rows of this segment that it sees.
    """

    tokens: Ints
    positions: Ints
    k_start: Ints
    k_end: Ints

    @property
    def size(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, tokens: Ints, k_end: Ints, positions: Ints | None = None) -> "Segment":
        """Rows that see all others up to `k_end`, at positions from 0 on by default."""
        at = np.arange(len(tokens)) if positions is None else positions
        return cls(*(np.asarray(x, np.int32) for x in (tokens, at, np.zeros(len(tokens)), k_end)))


def joined(segments: Sequence[Segment]) -> tuple[Segment, Int[np.ndarray, " segments"]]:
    """Segments one after another, and the first row of each."""
    starts = np.cumsum([0, *(part.size for part in segments)])[:-1]
    moved = [
        part._replace(k_start=part.k_start + start, k_end=part.k_end + start)
        for part, start in zip(segments, starts.tolist(), strict=True)
    ]
    return Segment(*(np.concatenate(column).astype(np.int32) for column in zip(*moved, strict=True))), starts


def ends(mask: str, prefix: int, chunk: int, after: int) -> Ints:
    """How far the rows of instruction, chunk and the rows behind it see.

    Arguments:
    - `mask`: "causal", "full", "none" or "query_to_chunk" (`Prefilling.score_mask`).
    - `prefix`, `chunk`, `after`: how many rows each has.

    Returns the end of each row's range, which begins with the first row.
    """
    before, rows = prefix + chunk, np.arange(prefix + chunk + after)
    if mask == "none":
        return np.full_like(rows, len(rows))
    in_chunk = (rows >= prefix) & (rows < before)
    if mask == "query_to_chunk":
        return np.where(in_chunk, before, len(rows))
    return np.where(in_chunk & (mask == "full"), before, rows + 1)
