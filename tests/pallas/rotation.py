"""The rotation of queries and keys in float64."""

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike


def turned(products: ArrayLike, angles: ArrayLike) -> Float[np.ndarray, "rows n"]:
    """`products` `[rows, n]`, of heads of twice as many numbers as there are `angles` for each row."""
    turn = np.asarray(angles, np.float64)
    rows, pairs = turn.shape
    halves = np.asarray(products, np.float64).reshape(rows, -1, 2, pairs)
    z = (halves[:, :, 0] + 1j * halves[:, :, 1]) * np.exp(1j * turn)[:, None]
    return np.stack([z.real, z.imag], 2).reshape(rows, -1)
