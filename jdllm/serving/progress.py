"""How far a request was at a moment, and what it waits for."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Progress(NamedTuple):
    """How far a request was at a moment: enough to go on from there."""

    tokens: np.ndarray
    logprobs: np.ndarray
    committed_in: np.ndarray
    steps: int
    block_step: int
    block: int
    rule_state: Mapping[str, np.ndarray]


class Awaited(NamedTuple):
    """Tokens of a request that a part leaves on the device: the `positions` of its head rows in the part,
    int32 and rising, and the index of the `first` of them, as `Launch.left_at` has it."""

    positions: np.ndarray
    first: int
