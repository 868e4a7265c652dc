"""Which keys each row of a sequence sees, as a range of packed rows."""

import numpy as np
from jaxtyping import Int32

from jdllm.models.config import ModelConfig

Range = Int32[np.ndarray, " length"]


def key_ranges(
    config: ModelConfig, start: int, length: int, *, block_length: int | None = None
) -> tuple[Range, Range]:
    """The ranges [k_start, k_end) of a sequence's rows.

    Arguments:
    - `config`: the model; its `attention` and `sliding_window` say what a row sees.
    - `start`: packed row of the sequence's first token.
    - `length`: tokens of the sequence.
    - `block_length`: makes attention block-causal instead: a row sees all blocks up to its own, whole.
      Blocks of so many tokens are counted from the sequence's first; the last may be cut off.

    Returns two int32 arrays of `length` packed rows.
    """
    row = np.arange(length, dtype=np.int32)
    first, end = np.zeros_like(row), np.full_like(row, length)
    if block_length is not None:
        end = np.minimum((row // block_length + 1) * block_length, length)
    elif config.in_order:
        end = row + 1
        if config.sliding_window is not None:
            first = np.maximum(end - config.sliding_window, 0)
    return (start + first).astype(np.int32), (start + end).astype(np.int32)
