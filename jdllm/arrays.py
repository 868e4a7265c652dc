"""Names for the arrays that cross from the host to the device."""

import jax
import numpy as np

Tensor = jax.Array | np.ndarray
"""An argument of an executable: made on the host as a NumPy array, seen as a JAX array when traced."""


def padded(x: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    """`x` with `fill` appended along its first axis until that is `size`; `numpy.pad` is much slower."""
    out = np.empty((size, *x.shape[1:]), x.dtype)
    out[: len(x)], out[len(x) :] = x, fill
    return out
