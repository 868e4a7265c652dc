"""Names for the arrays that cross from the host to the device."""

import jax
import numpy as np

Tensor = jax.Array | np.ndarray
"""An argument of an executable: made on the host as a NumPy array, seen as a JAX array when traced."""
