"""Requests of block models: finished blocks are stored once, the block behind them is denoised."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jdllm.checkpoints.token_text import Decode
from jdllm.decoding.block_sampling import check_blocks, check_editing, post_steps, with_post_steps
from jdllm.decoding.encoded_trace import Steps
from jdllm.decoding.rules import segment_row, step_table
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.serving.request import Request, of_committed
from jdllm.serving.spec import Block, RequestSpec, check_stops, checked_ids, mask_id_of, without_masks


@dataclasses.dataclass(frozen=True, eq=False)
class BlockSpec(RequestSpec):
    """What a request asks of a block model.

    - `blocks`: what is denoised one after another: blocks, or parts of them (`small_block_length`). They are
      counted from the beginning of the prompt; the prompt ends in the first.
    - `block_length`: positions of a block that is stored at once. A row sees its block and all blocks before
      it. Whole blocks of the prompt are stored before anything is denoised, or with the first step.
    """

    block_length: int

    @property
    def cached(self) -> bool:
        return True

    @property
    def forces_first(self) -> bool:
        return False

    @property
    def foretold(self) -> bool:
        """Whether the evaluation that stores a block gives the first token of the next one."""
        return self.shifted

    @property
    def seen_length(self) -> int:
        """Positions of the blocks whose rows see each other where they are stored."""
        return self.block_length

    @property
    def stored_rows(self) -> int:
        return max(self.blocks[-1].start // self.block_length * self.block_length, 1)


def block_spec(
    prompt: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    config: ModelConfig,
    decode: Decode | None = None,
) -> BlockSpec:
    """A request that appends masks to `prompt`, up to the end of a block, and fills them block by block.

    Arguments:
    - `prompt`: int32 ids `[length]`. An empty prompt asks for any text.
    - `sampling`: its `gen_length` need not fill whole blocks: what is denoised beyond is not returned. The
      blocks that `gen_length` takes, rounded up, share `steps`.
    - `decode`: ids to text, for stop strings.

    Raises `RequestError` for parameters that block models have no use for, an id outside the vocabulary, a
    mask id in the prompt (unless `prompt_masks` is "official": then masks in whole blocks of the prompt stay,
    and others are filled), a block length that is no divisor of a page, `steps` that do not divide, stop
    strings without `decode`, and editing with shifted logits.
    """
    check_blocks(sampling)
    check_editing(sampling, config)
    check_stops(sampling, config, decode)
    shifted, mask_id = config.logits_shift, mask_id_of(config)
    prompt = checked_ids(prompt, config, may_be_empty=not shifted)
    without_masks(prompt, sampling.changed(prompt_masks="error") if shifted else sampling, mask_id)
    length = block_length_of(sampling.block_length, config)
    small = small_block_length_of(sampling, length)
    masks = min(sampling.max_tokens or sampling.gen_length, sampling.gen_length)
    table = with_post_steps(step_table(sampling, small, steps_of_block(sampling, small), small), sampling)
    stop = len(prompt) + masks
    starts = range(len(prompt) // small * small, stop, small)
    blocks = tuple(Block(at, at + small, at + small - max(at, len(prompt)), table) for at in starts)
    seen = -(-stop // length) * length
    tokens = np.concatenate([prompt, np.full(seen - len(prompt), mask_id, np.int32)])
    tokens.setflags(write=False)
    return BlockSpec(
        prompt=prompt,
        tokens=tokens,
        blocks=blocks,
        returned=slice(len(prompt), stop),
        sampling=sampling,
        mask_id=mask_id,
        shifted=shifted,
        stop_ids=(*config.stop_ids, *sampling.stop_token_ids),
        decode=decode,
        segment=segment_row(sampling, config),
        block_length=length,
    )


def block_length_of(asked: int | None, config: ModelConfig) -> int:
    """Positions of a block: what is asked for, or else those of the model.

    Raises `RequestError` where a page is not cut into such blocks.
    """
    length = config.block_length if asked is None else asked
    assert length is not None  # a block model has one
    if length < 1 or PAGE_ROWS % length:
        raise RequestError(
            f"block_length is {length}, expected a divisor of {PAGE_ROWS}, such as {config.block_length},"
            " which config.json states or implies"
        )
    return length


def small_block_length_of(sampling: SamplingParams, length: int) -> int:
    """Positions that are filled before the next ones: those of a block, unless the request says less.

    Raises `RequestError` where a block is not cut into such parts.
    """
    small = sampling.small_block_length or length
    if length % small:
        raise RequestError(
            f"small_block_length is {small}, expected a divisor of the block's {length} positions"
        )
    return small


def steps_of_block(sampling: SamplingParams, length: int) -> int:
    """Denoising steps of a block: one for each position unless the request says how many there are."""
    blocks = -(-sampling.gen_length // length)
    if sampling.steps is None:
        return length
    if sampling.steps % blocks:
        raise RequestError(
            f"steps {sampling.steps} is not divisible by the {blocks} blocks of {length} that gen_length"
            f" {sampling.gen_length} takes: choose a multiple, such as {length * blocks}"
        )
    return sampling.steps // blocks


class BlockRequest(Request):
    """A request of a block model as it runs.

    - `block_length`, `seen_length`, `foretold`: of the spec.
    - `known`: tokens of finished blocks, those of the prompt included.
    - `computed`: how many of these are stored. The current block is denoised when all are.
    - `found`: how many were stored already when it was admitted.
    - `forwarded`: the positions of the block that is being filled, which each of its steps evaluates.
    """

    def __init__(self, spec: BlockSpec, id: int = 0):
        self.block_length, self.foretold = spec.block_length, spec.foretold
        self.seen_length = spec.seen_length
        self.known = self.computed = self.found = 0
        super().__init__(spec, id)
        # Rows of blocks of another length see other rows.
        self.content = np.array([spec.seen_length], np.int32).tobytes()
        self.post_left = post_steps(self.sampling)
        self._enter()

    @property
    def denoises(self) -> bool:
        """Whether the next step denoises; before it, finished blocks have to be stored."""
        return self.computed == self.known

    @property
    def storable(self) -> int:
        """How many of the first tokens are stored when the next part is, if this part has room for all."""
        return self.known

    @property
    def editing(self) -> bool:
        """Whether steps replace committed tokens of their block."""
        return self.sampling.editing_threshold is not None

    @property
    def settled(self) -> int | None:
        if not self.editing:
            return None
        return len(self.tokens) if self.finished else self.block.start

    @property
    def goes_on(self) -> bool:
        return self._block + 1 < len(self.blocks)

    @property
    def opens(self) -> bool:
        """Whether the first token behind the finished blocks is masked."""
        return bool(self.tokens[self.known] == self.mask_id)

    def masked(self) -> np.ndarray:
        start, stop, *_ = self.block
        return start + (self.tokens[start:stop] == self.mask_id).nonzero()[0]

    def candidates(self) -> np.ndarray:
        """Positions that the next step evaluates, rising: those that are masked, and with editing those that
        were masked when the block was entered."""
        start, stop = self.block.start, self.block.stop
        return start + np.flatnonzero(self.initial_masks[start:stop]) if self.editing else self.masked()

    def shown(self, positions: np.ndarray, step: Steps) -> np.ndarray:
        return super().shown(positions, step) | step.committed

    def find(self, rows: int) -> None:
        """Take in that so many of the first rows are stored already."""
        self.computed = self.found = self.stored = rows

    def store(self, forwarded: np.ndarray, stored: int) -> None:
        """Take in that so many rows are stored; `forwarded` does not matter."""
        self.computed = self.stored = stored

    def go_back(self) -> None:
        """Its stored keys are lost: they have to be computed again."""
        self.computed = self.stored = 0

    def sequences(self) -> Iterator[np.ndarray]:
        yield self.tokens[: self.known + self.block_length]

    def _commit(
        self,
        count: int,
        step: np.ndarray | int,
        positions: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        likeliest: np.ndarray | None,
    ) -> None:
        if self.foretold and self.known in positions:
            self.block_step -= 1  # the block before has given its first token: no step of its own
        if self.editing:
            edits = int(np.count_nonzero(self.tokens[positions] != self.mask_id))
            if not len(self.masked()):
                self.post_left = max(self.post_left - 1, 0) if edits else 0
            self.edits += edits
        before = self._block
        super()._commit(count, step, positions, tokens, logprobs, likeliest)
        if self._block > before:
            self.post_left = post_steps(self.sampling)
        if not self.finished:
            self._enter()

    def enter_next(self) -> None:
        super().enter_next()
        self._enter()

    def _enter(self) -> None:
        self.known = self.block.start // self.block_length * self.block_length
        self.forwarded = np.arange(self.known, self.known + self.block_length)

    def advance_many(self, positions: np.ndarray, steps: Steps) -> None:
        """Take in several steps, up to the one that completes the text where this ends the request.

        Where a block was stored that foretells nothing there is no step. With editing each step tells whether
        there is a next one.
        """
        if not len(positions):
            return
        if not self.sampling.stop_in_block and not self.editing:
            super().advance_many(positions, steps)
            return
        for step in map(Steps, *steps):
            if not self.finished:
                self.advance(*of_committed(positions, step))

    def _block_is_over(self) -> bool:
        start, stop, *_ = self.block
        some = self.post_left or (self.tokens[start:stop] == self.mask_id).any()
        filled = self.steps_left <= 0 or not some
        return filled or (self.sampling.stop_in_block and self._text_is_over())

    def _prompt_is_filled(self) -> bool:
        return self.mask_id not in self.tokens[self.blocks[0].start : self.returned.start]
