"""The difference of two methods that were measured on the same instances."""

import math

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from jdllm.demo.paired import Interval


def mean_interval(differences: Float[np.ndarray, " pairs"], level: float = 0.95) -> Interval | None:
    """Student's interval of the mean of what a measure of two methods differs by on each instance.

    Arguments:
    - `level`: confidence, between 0 and 1.

    Returns limits that enclose the mean, `None` for fewer than two differences.
    """
    count = len(differences)
    if count < 2:
        return None
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(count)
    reach = error * float(stdtrit(count - 1, (1 + level) / 2))
    return Interval(mean - reach, mean + reach)
