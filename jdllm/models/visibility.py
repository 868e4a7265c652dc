"""Which keys each row of a sequence sees, as a range of packed rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int32

from jdllm.arrays import Tensor
from jdllm.models.config import ModelConfig

Range = Int32[np.ndarray, " length"]
Bounds = Int[Tensor, " rows"]


def key_ranges(config: ModelConfig, start: int, length: int) -> tuple[Range, Range]:
    """The ranges [k_start, k_end) of a sequence's rows, as they are when the sequence is finished.

    Arguments:
    - `config`: the model; its `attention`, `block_length`, `causal_context` and `sliding_window` say what a
      row sees.
    - `start`: packed row of the sequence's first token.
    - `length`: tokens of the sequence.

    Returns two int32 arrays of `length` packed rows.
    """
    row = np.arange(length, dtype=np.int32)
    first, end = seen_range(config, row, length) or (np.zeros_like(row), np.full_like(row, length))
    return (start + first).astype(np.int32), (start + end).astype(np.int32)


def seen_range(config: ModelConfig, position: Bounds, length: Bounds | int) -> tuple[Any, Any] | None:
    """The range of positions that rows of a finished sequence see.

    Arguments:
    - `config`: the model; its `attention`, `block_length`, `causal_context` and `sliding_window` say what a
      row sees.
    - `position`: of each row, on the host or traced.
    - `length`: of the sequence of each row.

    Returns the first position of each range and the one behind its last; `None` where every row sees the
    whole sequence.
    """
    if config.in_order or config.causal_context:
        return causal_range(config, position)
    if config.attention == "block_causal":
        return block_range(config, position, length)
    return None


def causal_range(config: ModelConfig, position: Bounds) -> tuple[Any, Any]:
    """The range of positions that rows of a causal model see, and those of a causal context.

    Arguments:
    - `position`: of each row, on the host or traced.

    Returns the first position of each range and the one behind its last, which is the row itself.
    """
    end = position + 1
    return window_start(config, end, 0), end


def block_range(config: ModelConfig, position: Bounds, length: Bounds | int) -> tuple[Any, Any]:
    """The range of positions that rows of a block-causal model see whose blocks are counted from position 0:
    their block, and all blocks before it.

    Arguments:
    - `config`: the model; its `block_length` says where blocks end.
    - `position`: of each row, on the host or traced.
    - `length`: of the sequence of each row, where its last block ends.

    Returns the first position of each range and the one behind its last.
    """
    assert config.block_length is not None
    form = jnp if isinstance(position, jax.Array) else np
    block_end = (position // config.block_length + 1) * config.block_length
    return form.zeros_like(position), form.minimum(block_end, length)


def window_start(config: ModelConfig, end: Bounds | int, begin: Bounds | int) -> Any:
    """The first key that causal rows see whose ranges end at `end`, of keys from `begin` on."""
    form = jnp if isinstance(end, jax.Array) else np
    if config.sliding_window is None:
        return form.full_like(end, begin)
    return form.maximum(end - config.sliding_window, begin)
