"""Requests that fill blocks counted from the end of the prompt, behind a causal context or another one."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.block_sampling import check_blocks
from jdllm.decoding.causal_sampling import check_no_lossy_speculation
from jdllm.decoding.rules import segment_row, step_table
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.serving.blocks.request import BlockRequest, BlockSpec, steps_of_block
from jdllm.serving.spec import Block, check_stops, checked_ids, mask_id_of

_WHOLE = 1 << 30
"""Longer than any part that is stored at once, whose rows all see each other then."""


@dataclasses.dataclass(frozen=True, eq=False)
class ContextSpec(BlockSpec):
    """What a request asks that fills blocks behind a causal context.

    - `blocks`: counted from the end of the prompt. The evaluation that stores what lies before a block gives
      the first token of the block; steps fill the other positions.
    - `bidirectional`: the rows of the prompt see each other, and so do those of each finished block. Then
      steps fill all positions.
    """

    bidirectional: bool = False

    @property
    def foretold(self) -> bool:
        return not self.bidirectional

    @property
    def seen_length(self) -> int:
        return _WHOLE if self.bidirectional else self.block_length

    @property
    def stored_rows(self) -> int:
        return self.blocks[-1].start


def check_context(sampling: SamplingParams) -> None:
    """Raise `RequestError` where a field that such a request has no use for is not at its default.

    Arguments:
    - `sampling`: without a `generation_mode`.
    """
    check_blocks(sampling)
    check_no_lossy_speculation(sampling, "is for models without a causal context (SDAR, LLaDA2.0)")
    if sampling.small_block_length is not None:
        raise RequestError("blocks behind a causal context have no parts: leave small_block_length out")
    if sampling.editing_threshold is not None:
        raise RequestError("what is stored before a block gives its first token: leave editing_threshold out")
    if sampling.prompt_masks != "error":
        raise RequestError(
            "blocks begin behind the prompt, whose masks would stay: leave prompt_masks at 'error'"
        )


def context_spec(
    prompt: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    config: ModelConfig,
    decode: Decode | None = None,
    *,
    bidirectional: bool = False,
) -> ContextSpec:
    """A request that appends blocks to `prompt` and fills them one after another.

    Arguments:
    - `prompt`: int32 ids `[length]`, at least one.
    - `sampling`: without a `generation_mode`. Its `gen_length` need not fill whole blocks: what is filled
      beyond is not returned. The blocks that `gen_length` takes, rounded up, share `steps`, which fill all
      positions of a block, but the first where the context is causal.
    - `config`: the model, whose finished rows are causal.
    - `decode`: ids to text, for stop strings.
    - `bidirectional`: whether the context is not causal.

    Raises `RequestError` for parameters that such requests have no use for, an empty prompt, an id outside
    the vocabulary, a mask id in the prompt, a block of more rows than a page has, `steps` that do not divide,
    and stop strings without `decode`.
    """
    check_context(sampling)
    check_stops(sampling, config, decode)
    mask_id, prompt = mask_id_of(config), checked_ids(prompt, config)
    masks = np.flatnonzero(prompt == mask_id)
    if len(masks):
        raise RequestError(
            f"the prompt contains the mask id {mask_id} at position {masks[0]}: blocks begin behind"
            " the prompt, and nothing fills masks before them, so remove it"
        )
    length = sampling.block_length or config.block_length
    assert length is not None  # a block model has one
    if length > PAGE_ROWS:
        raise RequestError(f"block_length is {length}, expected at most {PAGE_ROWS}")
    start, returned = len(prompt), min(sampling.max_tokens or sampling.gen_length, sampling.gen_length)
    filled = length if bidirectional else max(length - 1, 1)
    table = step_table(sampling, filled, steps_of_block(sampling, length), length)
    starts = range(start, start + returned, length)
    blocks = tuple(Block(at, at + length, length, table) for at in starts)
    tokens = np.concatenate([prompt, np.full(length * len(blocks), mask_id, np.int32)])
    tokens.setflags(write=False)
    return ContextSpec(
        prompt=prompt,
        tokens=tokens,
        blocks=blocks,
        returned=slice(start, start + returned),
        sampling=sampling,
        mask_id=mask_id,
        shifted=False,
        stop_ids=(*config.stop_ids, *sampling.stop_token_ids),
        decode=decode,
        segment=segment_row(sampling, config),
        block_length=length,
        bidirectional=bidirectional,
    )


def check_at_once(spec: ContextSpec, rows: int) -> None:
    """Raise `RequestError` where the prompt or a block of a bidirectional request is too long for one part.

    Arguments:
    - `rows`: that a part stores at most, counted from the page in which it begins.
    """
    longest = max(len(spec.prompt), *(one.start % PAGE_ROWS + spec.block_length for one in spec.blocks))
    if spec.bidirectional and longest > rows:
        raise RequestError(
            "generation_mode 'bidirectional' reads the prompt at once, and each block: this takes"
            f" {longest} rows, and a part has at most {rows}: shorten the prompt, raise"
            " max_num_batched_tokens, or set generation_mode='diffusion'"
        )


class ContextRequest(BlockRequest):
    """A request that fills blocks behind a causal context, as it runs."""

    def __init__(self, spec: ContextSpec, id: int = 0):
        super().__init__(spec, id)
        # Rows of a causal context do not depend on blocks. Others depend on where the prompt ends.
        whole = [np.array([spec.block_length], np.int32), spec.prompt] if spec.bidirectional else []
        self.content = b"".join(part.tobytes() for part in whole)

    @property
    def storable(self) -> int:
        if self.foretold:
            return self.known
        start, length = len(self.spec.prompt), self.block_length
        blocks = max(self.computed - start + length, 0) // length
        return min(start + blocks * length, self.known)

    def _enter(self) -> None:
        self.known = self.block.start
        self.forwarded = np.arange(self.known, self.known + self.block_length)
