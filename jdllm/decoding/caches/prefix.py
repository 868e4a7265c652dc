"""Prefix cache of Fast-dLLM v1."""

import numpy as np

from jdllm.decoding.caches.policy import CachePolicy, View


class Prefix(CachePolicy):
    """Everything to the left of the block."""

    def candidates(self, view: View) -> np.ndarray:
        return np.arange(view.start)


POLICY = Prefix("prefix", "everything to the left of the block")
