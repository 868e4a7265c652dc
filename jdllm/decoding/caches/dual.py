"""Dual cache of Fast-dLLM v1."""

from typing import TYPE_CHECKING

from jdllm.decoding.caches.policy import CachePolicy, View

if TYPE_CHECKING:
    import numpy as np


class Dual(CachePolicy):
    """Everything outside the block."""

    def candidates(self, view: View) -> "np.ndarray":
        import numpy as np  # what declares parameters is read without NumPy

        return np.concatenate([np.arange(view.start), np.arange(view.stop, view.length)])


POLICY = Dual("dual", "everything outside it (Fast-dLLM)")
