"""dKV-Cache, decode variant."""

from typing import TYPE_CHECKING

from jdllm.decoding.caches.policy import CachePolicy, View

if TYPE_CHECKING:
    import numpy as np


class Selective(CachePolicy):
    """The prompt, and all tokens that were committed before the refresh.

    A token is thus evaluated once as itself before it is stored. Later tokens are evaluated until the next
    refresh, where dKV-Cache stores them one step after they were committed.
    """

    def candidates(self, view: View) -> "np.ndarray":
        forwarded = view.masked.copy()
        if view.shifted:
            forwarded[:-1] |= view.masked[1:]
        return (~forwarded).nonzero()[0]


POLICY = Selective("selective", "the prompt and the decoded tokens (dKV-Cache)", delay=1, interval=8)
