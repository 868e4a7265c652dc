"""Denoising steps with cached keys and values: a step that refreshes them, a device loop that reuses them."""

from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor
from jdllm.chunks import UNCUT, ChunkConfig
from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.step import SelectionBits, keyed_bits, run_steps, step_behind
from jdllm.decoding.unseen import Unseen, left_by, with_unseen
from jdllm.execution.few_rows.chain import chain_operands, chains
from jdllm.execution.paged.forward import forward_refresh, forward_reuse, forward_some_layers
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.paged.selection import Selection
from jdllm.execution.transformer import Wanted
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.split_attention import PageTable


def refresh(
    params: Params,
    batch: Batch,
    selection: Selection,
    table: PageTable,
    pool: KvArrays,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    scored: bool,
    left: int,
    usual: bool = False,
    chunks: ChunkConfig = UNCUT,
    selection_bits: SelectionBits = keyed_bits,
) -> tuple[tuple[Trace, Int[Array, " left"]], KvArrays]:
    """One denoising step of whole sequences, whose keys and values are stored.

    Arguments:
    - `params`, `batch`: stacked weights, and the packed batch.
    - `selection`: which rows may be stored, and how many; a segment that stores nothing keeps no candidate.
    - `table`: the pages of each segment.
    - `pool`: written in place; donate it.
    - `config`, `mask_id`, `level`: static.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.
    - `scored`: whether any segment keeps its best candidates; static.
    - `left`: of how many head rows tokens stay on the device; static.
    - `usual`: whether all these are usual, as in `jdllm.execution.paged.selection.sources`; static.
    - `chunks`: static; chunk counts of the layers, of which that of heads is 1.
    - `selection_bits`: static; the source of the draws that select rows.

    Returns the trace of one step, the tokens that are `left_by` it, and the pool. The step itself is exact
    where every row sees its whole sequence: it evaluates everything.
    """

    def forward(tokens: RowInts, wanted: Wanted) -> tuple[Hidden, KvArrays]:
        given = params, config, tokens, batch.rows, pool, selection, table
        return forward_refresh(*given, scored=scored, usual=usual, wanted=wanted, chunks=chunks)

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
    return (trace, left_by(trace, batch, left)), pool


def some_layers(
    params: Params,
    hidden: Hidden,
    rows: Rows,
    selection: Selection,
    table: PageTable,
    first: Int[Tensor, ""],
    pool: KvArrays,
    *,
    config: ModelConfig,
    count: int,
) -> tuple[tuple[Hidden, Float[Array, " 1"]], KvArrays]:
    """Some layers of one refresh of the usual form that scores keys; others follow later.

    Arguments:
    - `params`: stacked weights.
    - `hidden`: the rows behind the layers before; donate them.
    - `rows`: positions and key ranges of all rows.
    - `selection`, `table`: which rows may be stored, how many, and the pages of each segment.
    - `first`: int32, the first of these layers.
    - `pool`: written in place; donate it.
    - `config`: static; all layers are alike.
    - `count`: of the layers, without the model's last one; static.

    Returns the rows behind these layers with one number of them, by which the host knows when they are there,
    and the pool.
    """
    given = params, config, hidden, rows, pool, selection, table
    hidden, pool = forward_some_layers(*given, first=first, count=count)
    return (hidden, hidden[0, :1]), pool


def last_layers(
    params: Params,
    batch: Batch,
    selection: Selection,
    table: PageTable,
    hidden: Hidden,
    pool: KvArrays,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    count: int,
    selection_bits: SelectionBits = keyed_bits,
) -> tuple[Trace, KvArrays]:
    """The last layers of a refresh that `some_layers` began, and its step.

    Arguments:
    - `hidden`: the rows behind the layers before.
    - `count`: of the layers; static.
    - `params`, `batch`: stacked weights, and the packed batch.
    - `selection`, `table`: which rows may be stored, how many, and the pages of each segment.
    - `pool`: written in place; donate it.
    - `config`, `mask_id`, `level`: static.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.
    - `selection_bits`: static; the source of the draws that select rows.

    Returns the trace of one step, and the pool.
    """

    def forward(_: RowInts, wanted: Wanted) -> tuple[Hidden, KvArrays]:
        given = params, config, hidden, batch.rows, pool, selection, table
        return forward_some_layers(*given, first=config.num_layers - count, count=count, wanted=wanted)

    return step_behind(
        forward,
        params,
        batch,
        config=config,
        mask_id=mask_id,
        logits_chunks=logits_chunks,
        level=level,
        selection_bits=selection_bits,
    )


def reuse(
    params: Params,
    batch: Batch,
    table: PageTable,
    pool: KvArrays,
    unseen: Unseen,
    max_steps: Int[Array, ""] | None,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    selection_bits: SelectionBits = keyed_bits,
) -> tuple[Trace, Int[Array, " left"]]:
    """Run up to `max_steps` denoising steps of the rows that are not stored, in a loop like `denoise`.

    Arguments:
    - `params`: stacked weights.
    - `batch`: the rows that are forwarded, with the tokens that the host knows.
    - `table`: the pages, and the fresh rows, that each tile of rows sees.
    - `pool`: keys and values of the last refresh; read only.
    - `unseen`: the tokens that parts before left on the device.
    - `max_steps`: int32, at most the columns of the segments' step tables; `None` for one step without a
      loop. Tokens do not depend on it.
    - `config`, `mask_id`, `level`: static.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.
    - `selection_bits`: static; the source of the draws that select rows.

    Returns the trace, and the tokens that are `left_by` a single step; after several they mean nothing.
    Approximate: the stored keys and values are as old as the last refresh.
    """
    batch = batch._replace(tokens=with_unseen(batch.tokens, unseen))
    operands = chain_operands(params, config) if chains(params, config, len(batch.tokens)) else None
    trace = run_steps(
        lambda tokens, asked: (
            forward_reuse(params, config, tokens, batch.rows, pool, table, operands=operands),
            asked.sources,
        ),
        params,
        batch,
        max_steps,
        config=config,
        mask_id=mask_id,
        logits_chunks=logits_chunks,
        level=level,
        selection_bits=selection_bits,
    )
    return trace, left_by(trace, batch, len(unseen.reused))
