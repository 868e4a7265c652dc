"""Requests that fill masks inside the blocks of a text."""

from collections.abc import Sequence

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.block_sampling import check_blocks, check_editing, with_post_steps
from jdllm.decoding.causal_sampling import check_no_lossy_speculation
from jdllm.decoding.rules import segment_row, step_table
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.serving.blocks.request import BlockSpec, block_length_of, small_block_length_of
from jdllm.serving.spec import Block, checked_ids, mask_id_of

_ENDS = ("stop", "stop_token_ids", "stop_in_block", "min_tokens")


def block_infill_spec(
    tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, config: ModelConfig
) -> BlockSpec:
    """A request that fills the masks inside `tokens`, block by block.

    Arguments:
    - `tokens`: int32 ids `[length]`, with masks. Blocks are counted from the first.
    - `sampling`: the blocks with masks share `steps`; by default each has a step for each of its positions.
      `gen_length`, `max_tokens` and `early_stop` do not apply.

    A block with masks is denoised, and its given tokens stay. Other blocks before the last mask are stored as
    they are; what lies behind its block is never evaluated. Where the text ends inside the last block, masks
    stand behind the text, and stay.

    Raises `RequestError` where nothing is masked, for parameters that block models or infillings have no use
    for, an id outside the vocabulary, a block length that is no divisor of a page, and `steps` that do not
    divide; with shifted logits also for editing and for a mask at position 0.
    """
    _check(sampling)
    check_blocks(sampling)
    check_editing(sampling, config)
    mask_id, tokens = mask_id_of(config), checked_ids(tokens, config)
    masks = np.flatnonzero(tokens == mask_id)
    if not len(masks):
        raise RequestError(f"nothing to infill: the sequence has no mask id {mask_id}")
    if config.logits_shift and masks[0] == 0:
        raise RequestError(
            f"position 0 is masked: a token of a {config.family} model is predicted by the one before it"
        )
    length = block_length_of(sampling.block_length, config)
    small = small_block_length_of(sampling, length)
    starts, counts = np.unique(masks // small * small, return_counts=True)
    table = step_table(sampling, small, _steps_of_each(sampling, len(starts), small), small)
    table = with_post_steps(table, sampling)
    blocks = tuple(
        Block(start, min(start + small, len(tokens)), count, table)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    )
    evaluated = (blocks[-1].start // length + 1) * length
    whole = padded(tokens, max(len(tokens), evaluated), mask_id)
    whole.setflags(write=False)
    return BlockSpec(
        prompt=tokens,
        tokens=whole,
        blocks=blocks,
        returned=slice(0, len(tokens)),
        sampling=sampling,
        mask_id=mask_id,
        shifted=config.logits_shift,
        stop_ids=(),
        decode=None,
        segment=segment_row(sampling, config),
        block_length=length,
    )


def _check(sampling: SamplingParams) -> None:
    for name in _ENDS:
        if getattr(sampling, name):
            raise RequestError(f"a sequence to infill has no end to stop at: leave {name} out")
    if sampling.generation_mode in ("self_speculation", "auto"):
        raise RequestError("self-speculation generates, and fills nothing in: leave generation_mode out")
    check_no_lossy_speculation(sampling, "generates, and fills nothing in")


def _steps_of_each(sampling: SamplingParams, blocks: int, length: int) -> int:
    """Steps of each of so many blocks with masks."""
    if sampling.steps is None:
        return length
    if sampling.steps % blocks:
        raise RequestError(
            f"steps {sampling.steps} is not divisible by the {blocks} blocks of {length} that have masks"
        )
    return sampling.steps // blocks
