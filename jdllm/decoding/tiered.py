"""The denoising step for contexts that do not fit on the device: the host drives it, chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jdllm.compiling.executables import Executables
from jdllm.decoding.batch import Batch, SegmentParams, Trace
from jdllm.decoding.head import Choice, decide, guide
from jdllm.decoding.step import (
    AskedRows,
    SelectionBits,
    asked_rows,
    empty_trace,
    keyed_bits,
    may_step,
    transfer,
)
from jdllm.execution.offload.forward import forward_tiered
from jdllm.execution.offload.tiers import HostTiers
from jdllm.host_memory import IN_FLIGHT, to_device
from jdllm.models.block import Hidden
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, head_weights
from jdllm.pallas.masked_logits import LISTED, Level, Likeliest, rows_at_once

_KEPT_CHUNKS = IN_FLIGHT - 1
"""Hidden chunks that stay on the device: the last used chunk of the guided and of the unguided rows."""


def denoise_tiered(
    params: Params,
    batch: Batch,
    *,
    config: ModelConfig,
    mask_id: int,
    tiers: HostTiers,
    logits_chunks: int,
    level: Level,
    executables: Executables,
    selection_bits: SelectionBits = keyed_bits,
) -> Trace:
    """Run one denoising step, or none where a segment has already finished its block.

    Arguments:
    - `params`: stacked weights.
    - `batch`: the packed batch as NumPy arrays.
    - `tiers`: arrays in host memory, and the sizes of chunks.
    - `logits_chunks`: into how many chunks the head rows are cut; logits exist for one at a time.
    - `config`, `mask_id`, `level`: the model, the id of its mask, and what the head computes for a row.
    - `selection_bits`: the source of the draws that select rows.
    - `executables`: where the parts of the step are kept.

    Returns the trace of at most one step. Exact: `denoise` chooses and commits the same tokens.
    """
    asked, may = jax.device_get(executables.call(_asked, batch, config=config, mask_id=mask_id))
    if not may:
        return empty_trace(batch, level)
    hidden = forward_tiered(params, config, batch.tokens, batch.rows, tiers=tiers, call=executables.call)
    choice = _choose(
        params,
        config,
        hidden,
        asked,
        batch.segments,
        chunk_rows=tiers.chunk_rows,
        chunks=logits_chunks,
        level=level,
        executables=executables,
    )
    return executables.call(_transfer, batch, asked, choice, selection_bits=selection_bits, level=level)


def head_buffers(
    config: ModelConfig, tiers: HostTiers, head_rows: int, dtype: jnp.dtype | str
) -> dict[str, int]:
    """Bytes of all arrays that are on the device while a chunk of `head_rows` head rows is evaluated.

    Returns bytes by name. Not among them: the weights, and temporaries inside executables.
    """
    width = config.hidden_size * jnp.dtype(dtype).itemsize
    return {
        "hidden chunks": (_KEPT_CHUNKS + 1) * tiers.chunk_rows * width,
        "hidden rows": 2 * head_rows * width,
    }


def _choose(
    params: Params,
    config: ModelConfig,
    hidden: list[Hidden],
    asked: AskedRows,
    segments: SegmentParams,
    *,
    chunk_rows: int,
    chunks: int,
    level: Level,
    executables: Executables,
) -> Choice:
    """`jdllm.decoding.head.choose` of hidden rows in host memory, chunks of `chunk_rows`."""
    (device,) = hidden[0].devices()
    weights = {"final_norm": params["final_norm"], "head": head_weights(params)}
    total, count = len(asked.masked), asked.count
    size = rows_at_once(total, chunks, head_weights(params), level)
    guided, unguided = (np.asarray(rows) for rows in asked.sources)
    load = functools.lru_cache(_KEPT_CHUNKS)(lambda index: to_device(hidden[index], device))

    def gather(sources: np.ndarray) -> Hidden:
        rows = jnp.zeros((size, config.hidden_size), hidden[0].dtype, device=device)
        for index in np.unique(sources // chunk_rows):
            places = sources - np.int32(index * chunk_rows)
            rows = executables.call(take_rows, rows, load(index), places, donate=("rows",))
            jax.block_until_ready(rows)  # a chunk is not fetched before the one in front was read
        return rows

    likeliest = None
    if level >= Level.FILTERED:
        likeliest = Likeliest(np.zeros((total, LISTED), np.int32), np.zeros((total, LISTED), np.float32))
    whole = np.zeros(total, np.int32), *np.zeros((2, total), np.float32), likeliest
    for start in range(0, count, size):
        start = min(start, total - size)
        window = slice(start, start + size)
        # Rows from `count` on mean nothing: they repeat another, so that no chunk is fetched for them.
        used = np.minimum(np.arange(total)[window], count - 1)
        sources = [guided[used]] if np.array_equal(guided, unguided) else [guided[used], unguided[used]]
        part = executables.call(
            decide_window,
            weights,
            [gather(rows) for rows in sources],
            asked.rows.segment[window],
            asked.positions[window],
            segments,
            np.int32(count - start),
            config=config,
            level=level,
        )
        for column, values in zip(*map(jax.tree.leaves, (whole, jax.device_get(part))), strict=True):
            column[window] = values
    return Choice(*jax.tree.map(jnp.asarray, whole))


def _asked(batch: Batch, *, config: ModelConfig, mask_id: int) -> tuple[AskedRows, Bool[Array, ""]]:
    """What a step asks for, and whether there may be one."""
    asked = asked_rows(config, jnp.asarray(batch.tokens), batch, mask_id, Level.TOP)
    return asked, may_step(asked.masked, batch, 0)


def take_rows(rows: Hidden, chunk: Hidden, places: Int[Array, " rows"]) -> Hidden:
    """Replace the rows whose place lies in `chunk`."""
    inside = (places >= 0) & (places < chunk.shape[0])
    return jnp.where(inside[:, None], chunk[jnp.clip(places, 0, chunk.shape[0] - 1)], rows)


def decide_window(
    weights: Params,
    sources: list[Float[Array, "head hidden"]],
    segment: Int[Array, " head"],
    positions: Int[Array, " head"],
    segments: SegmentParams,
    count: Int[Array, ""],
    *,
    config: ModelConfig,
    level: Level,
) -> Choice:
    """`sources` are the hidden rows that predict the tokens, and, if they differ, the unguided ones."""
    guidance = jnp.asarray(segments.guidance)[segment]
    h = guide(weights, config, sources[0], sources[-1], guidance)
    return decide(weights, h, segment, positions, segments, segments.step, count, level=level)


def _transfer(
    batch: Batch,
    asked: AskedRows,
    choice: Choice,
    *,
    selection_bits: SelectionBits,
    level: Level,
) -> Trace:
    tokens = jnp.asarray(batch.tokens)
    return transfer(tokens, empty_trace(batch, level), batch, asked, choice, selection_bits, level)[1]
