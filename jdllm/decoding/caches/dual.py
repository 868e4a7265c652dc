"""Dual cache of Fast-dLLM v1."""

import numpy as np

from jdllm.decoding.caches.policy import CachePolicy, View


class Dual(CachePolicy):
    """Everything outside the block."""

    def candidates(self, view: View) -> np.ndarray:
        return np.concatenate([np.arange(view.start), np.arange(view.stop, view.length)])


POLICY = Dual("dual", "everything outside it (Fast-dLLM)")
