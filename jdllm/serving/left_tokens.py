"""The tokens that parts leave on the device for parts that are packed before the host has seen them."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jdllm.compiling.over_cards import everywhere
from jdllm.decoding.unseen import Unseen
from jdllm.models.weights import Params
from jdllm.serving.demands import Kind


class LeftTokens:
    """The tokens of the last refresh, and of the last single step that reused.

    Arguments:
    - `size`: how many head rows of a part leave tokens.
    - `params`: weights on the device.

    - `nothing`: as many zeros, on the device.
    """

    def __init__(self, size: int, params: Params):
        self.size = size
        self.nothing = everywhere(jnp.zeros(size, jnp.int32), params)
        self._left_by = {kind: self.nothing for kind in (Kind.REFRESH, Kind.REUSE)}

    def keep(self, kind: Kind, tokens: Int[Array, " left"]) -> None:
        """Take in what a part of a kind leaves; in the thread of the parts."""
        self._left_by[kind] = tokens

    def begins(self, kind: Kind, candidates: Sequence[np.ndarray]) -> list[int] | None:
        """`Launch.left_at` of a part of a kind; `None` where it has too many head rows.

        Arguments:
        - `candidates`: for each request the positions of its head rows.
        """
        stops = np.cumsum([0, *map(len, candidates)])
        first = self.size if kind is Kind.REUSE else 0
        return (first + stops).tolist()[:-1] if stops[-1] <= self.size else None

    def unseen(self, source: Int[np.ndarray, " rows"]) -> Unseen:
        """The tokens that rows take from the parts before; in the thread of the parts. Where no row waits for
        a part, its tokens are left out: they fail with the part.

        Arguments:
        - `source`: as `Unseen.source` counts.
        """
        of_refresh, of_reuse = (source >= 0) & (source < self.size), source >= self.size
        refreshed, reused = (
            self._left_by[kind] if rows.any() else self.nothing
            for kind, rows in ((Kind.REFRESH, of_refresh), (Kind.REUSE, of_reuse))
        )
        return Unseen(refreshed, reused, source)
