"""Storing finished blocks of block models, alone or with the first step of the block behind each."""

import numpy as np
from jaxtyping import Array, Float, Int

from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.step import SelectionBits, keyed_bits, step_behind
from jdllm.decoding.unseen import Unseen, left_by, with_unseen
from jdllm.execution.paged.forward import forward_storing
from jdllm.execution.paged.parts import PackedParts, Seen, Storage, forward_parts, seeing
from jdllm.execution.paged.place import Place
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.transformer import Wanted
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.split_attention import PageTable

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


def store_and_step(
    params: Params,
    batch: Batch,
    place: Place,
    table: PageTable,
    unseen: Unseen,
    pool: KvArrays,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    selection_bits: SelectionBits = keyed_bits,
) -> tuple[tuple[Trace, Int[Array, " left"]], KvArrays]:
    """Store finished blocks, and take the first step of the block behind them in the same evaluation.

    Arguments:
    - `params`: stacked weights.
    - `batch`: the rows of finished blocks and of those behind them, in tiles of one block, with the tokens
      that the host knows. Head rows are masked rows of the latter.
    - `place`: where the rows of finished blocks are stored.
    - `table`: the pages and the blocks among the rows that each tile sees: its own block and those before.
    - `unseen`: the tokens that parts before left on the device.
    - `pool`: keys and values of all requests, written in place: donate it.
    - `config`, `mask_id`, `level`: static.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.
    - `selection_bits`: static; the source of the draws that select rows.

    Returns the trace of one step, the tokens that are `left_by` it, and the pool. Exact: rows of a block see
    all of the blocks before it.
    """
    batch = batch._replace(tokens=with_unseen(batch.tokens, unseen))

    def forward(tokens: RowInts, wanted: Wanted) -> tuple[Hidden, KvArrays]:
        hidden, written = forward_storing(params, config, tokens, batch.rows, pool, table, place)
        return hidden[wanted.rows], written

    trace, pool = step_behind(
        forward,
        params,
        batch,
        config=config,
        mask_id=mask_id,
        logits_chunks=logits_chunks,
        level=level,
        selection_bits=selection_bits,
    )
    return (trace, left_by(trace, batch, len(unseen.reused))), pool
