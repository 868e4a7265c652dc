"""Plans held against the compiler: the memory that XLA allots to a step for a card that need not be there."""

import dataclasses

import numpy as np

from jdllm.compiling.executables import temp_bytes
from jdllm.decoding.batch import Batch, HeadRows, SegmentParams
from jdllm.decoding.rules import initial_states, segment_columns, segment_row
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import denoise
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.spread import abstract_parts
from jdllm.pallas.device import preferring
from jdllm.planning.aot import compile_for, has_compiler, target_devices
from jdllm.planning.ladder import bucket_entry
from jdllm.planning.plan import MemoryPlan, Workload
from jdllm.planning.templates import LAYERS


def compiler_temp_bytes(
    workload: Workload,
    plan: MemoryPlan,
    target: str,
    *,
    layers: int = LAYERS,
    whole: ModelConfig | None = None,
) -> int | None:
    """Compile the planned step for a described card.

    Arguments:
    - `workload`, `plan`: what was planned.
    - `target`: the card, as `jdllm.planning.aot.target_sharding` names it.
    - `layers`: layers to compile; every layer reuses the memory of the one before.
    - `whole`: the model whose part on each of several cards was planned; `None` for one card.

    Returns the bytes of its temporaries, the compiler's word for `plan.activation.peak_bytes`; `None` where
    there is no compiler for the target (`has_compiler`) or the step is not one executable (host tiers).
    """
    if plan.tiers is not None or not has_compiler():
        return None
    config = dataclasses.replace(whole or workload.config, num_layers=layers)
    params = abstract_parts(config, workload.dtype, target_devices(target, config.cards))
    batch = _batch(config, plan)
    with preferring(workload.device.kernels):
        compiled = compile_for(
            target,
            denoise,
            *(params, batch, np.int32(1)),
            config=config,
            mask_id=config.mask_id or 0,
            chunks=plan.chunks,
            level=workload.level,
        )
    return temp_bytes(compiled)


def _batch(config: ModelConfig, plan: MemoryPlan) -> Batch:
    """A batch of the plan's sizes that asks for nothing."""
    entry = bucket_entry(plan.rows, plan.head_rows)
    rows, head = (np.zeros(size, np.int32) for size in (entry.rows, entry.head_rows))
    segment, table = np.zeros(entry.segments, np.int32), np.zeros((entry.segments, entry.steps), np.int32)
    asked = segment_columns([segment_row(SamplingParams(), config)] * entry.segments)
    segments = SegmentParams(
        **asked, step=segment, steps_left=segment, quota=table, fraction=table.astype(np.float32)
    )
    states = initial_states(entry.head_rows, entry.segments)
    return Batch(rows, Rows(rows, rows, rows), HeadRows(head, head, head), segments, states)
