"""Denoising steps with cached keys and values: a step that refreshes them, a device loop that reuses them."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.step import (
    SelectionBits,
    asked_rows,
    empty_trace,
    evaluate,
    keyed_bits,
    run_steps,
    transfer,
    wanted_of,
)
from jdllm.execution.few_rows.chain import chain_operands, chains
from jdllm.execution.paged.forward import forward_refresh, forward_reuse
from jdllm.execution.paged.pool import KeyValuePool
from jdllm.execution.paged.selection import Selection
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.split_attention import PageTable


def refresh(
    params: Params,
    batch: Batch,
    selection: Selection,
    table: PageTable,
    pool: KeyValuePool,
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    scored: bool,
    selection_bits: SelectionBits = keyed_bits,
) -> tuple[Trace, KeyValuePool]:
    """One denoising step of whole sequences, whose keys and values are stored.

    Arguments:
    - `params`, `batch`, `config`, `mask_id`, `level`, `selection_bits`: as of `jdllm.decoding.step.denoise`.
    - `selection`, `table`, `pool`, `scored`: as of `forward_refresh`; a segment that stores nothing keeps
      none of its candidates.
    - `logits_chunks`: into how many chunks the head rows are cut where logits exist; static.

    Returns the trace of one step, and the pool. The step itself is exact: it
    evaluates everything.
    """
    tokens = jnp.asarray(batch.tokens)
    asked = asked_rows(config, tokens, batch, mask_id, level)
    wanted, sources = wanted_of(asked)
    hidden, pool = forward_refresh(
        params, config, tokens, batch.rows, pool, selection, table, scored=scored, wanted=wanted
    )
    choice = evaluate(params, config, hidden, sources, asked, batch, 0, chunks=logits_chunks, level=level)
    trace = transfer(tokens, empty_trace(batch, level), batch, asked, choice, selection_bits, level)[1]
    return trace, pool


def reuse(
    params: Params,
    batch: Batch,
    table: PageTable,
    pool: KeyValuePool,
    max_steps: Int[Array, ""],
    *,
    config: ModelConfig,
    mask_id: int,
    logits_chunks: int,
    level: Level,
    selection_bits: SelectionBits = keyed_bits,
) -> Trace:
    """Run up to `max_steps` denoising steps of the rows that are not stored, in a loop like `denoise`.

    Arguments:
    - `batch`: the rows that are forwarded.
    - `table`, `pool`: as of `forward_reuse`.
    - the others: as of `refresh` and `jdllm.decoding.step.denoise`.

    Returns the trace. Approximate: what is stored is as old as the last refresh.
    """
    operands = chain_operands(params, config) if chains(params, config, len(batch.tokens)) else None
    return run_steps(
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
