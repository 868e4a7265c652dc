"""Storing finished blocks of block models: an evaluation that nobody chooses tokens from."""

import numpy as np
from jaxtyping import Array, Float

from jdllm.execution.paged.parts import PackedParts, Seen, Storage, forward_parts, seeing
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.transformer import Wanted
from jdllm.models.block import RowInts, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params

_LAST_ROWS = 8


def store_blocks(
    params: Params,
    tokens: RowInts,
    rows: Rows,
    storage: Storage,
    seen: Seen,
    pool: KvArrays,
    *,
    config: ModelConfig,
) -> tuple[Float[Array, " 1"], KvArrays]:
    """Evaluate whole blocks and store their keys and values.

    Arguments:
    - `params`: stacked weights.
    - `tokens`: int32 ids of the packed rows.
    - `rows`: their positions and key ranges.
    - `storage`: where the rows are stored.
    - `seen`: which stored rows they see.
    - `pool`: keys and values of all requests, written in place: donate it.
    - `config`: the model; static.

    Returns a number by which the host knows when the rows are stored, and the pool. Exact: stored rows depend
    on no later block.
    """
    # Of the last layer only keys and values are needed. It evaluates a few rows besides: products of one row
    # would become sums, for which the compiler copies the weights of all layers while it tries them.
    wanted = Wanted(np.zeros(_LAST_ROWS, np.int32), np.zeros(_LAST_ROWS, bool))
    parts = seeing(PackedParts(tokens, rows, None, None, storage, wanted), seen)
    hidden, written = forward_parts(params, config, parts, pool)
    assert written is not None
    return hidden[0, :1], written
