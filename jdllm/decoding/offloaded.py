"""The denoising step of a model some of whose layers are in host memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.step import (
    SelectionBits,
    asked_rows,
    empty_trace,
    evaluate,
    keyed_bits,
    masked_rows,
    may_step,
    transfer,
)
from jdllm.execution.offload.layer_stream import OffloadedWeights
from jdllm.models.block import Hidden
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level


def denoise_offloaded(
    weights: OffloadedWeights,
    batch: Batch,
    *,
    mask_id: int,
    chunks: ChunkConfig,
    level: Level,
    executables: Executables,
    selection_bits: SelectionBits = keyed_bits,
) -> Trace:
    """Run one denoising step, or none where a segment has already finished its block.

    Arguments:
    - `weights`: of the model.
    - `batch`: the packed batch as NumPy arrays.
    - `mask_id`, `chunks`, `level`: the id of the mask, chunk counts, and what the head computes for a row.
    - `selection_bits`: the source of the draws that select rows.
    - `executables`: where the parts of the step are kept.

    Returns the trace of at most one step. Exact: `denoise` chooses and commits the same tokens.
    """
    if not jax.device_get(executables.call(_may, batch, mask_id=mask_id)):
        return empty_trace(batch, level)
    hidden = weights.run(batch.tokens, batch.rows, chunks=chunks, call=executables.call)
    head = {name: weights.top[name] for name in ("final_norm", "head" if "head" in weights.top else "embed")}
    return executables.call(
        _commit,
        head,
        hidden,
        batch,
        config=weights.config,
        mask_id=mask_id,
        chunks=chunks.logits,
        level=level,
        selection_bits=selection_bits,
        tuned=False,  # a copy of the head would not fit
    )


def _may(batch: Batch, *, mask_id: int) -> Bool[Array, ""]:
    return may_step(masked_rows(jnp.asarray(batch.tokens), batch, mask_id), batch, 0)


def _commit(
    head: Params,
    hidden: Hidden,
    batch: Batch,
    *,
    config: ModelConfig,
    mask_id: int,
    chunks: int,
    level: Level,
    selection_bits: SelectionBits,
) -> Trace:
    """What `jdllm.decoding.step.run_steps` does with the hidden rows of a step."""
    tokens = jnp.asarray(batch.tokens)
    asked = asked_rows(config, tokens, batch, mask_id, level)
    choice = evaluate(head, config, hidden, asked.sources, asked, batch, 0, chunks=chunks, level=level)
    return transfer(tokens, empty_trace(batch, level), batch, asked, choice, selection_bits, level)[1]
