"""Prefix cache of Fast-dLLM v1."""

from typing import TYPE_CHECKING

from jdllm.decoding.caches.policy import CachePolicy, View

if TYPE_CHECKING:
    import numpy as np


class Prefix(CachePolicy):
    """Everything to the left of the block."""

    def candidates(self, view: View) -> "np.ndarray":
        import numpy as np  # what declares parameters is read without NumPy

        return np.arange(view.start)


POLICY = Prefix("prefix", "everything to the left of the block")
