"""Numbers at the ends of what kernels of the head compute with."""

import numpy as np

LOWEST = float(np.finfo(np.float32).min)
"""The logit of an id that cannot be chosen: finite, so that differences of such logits are numbers."""

NO_ID = 2**30
"""Larger than any id."""

NOTHING = -200.0
"""2 to this power is 0 in f32, and 0 times this is 0."""
