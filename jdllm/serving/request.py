"""One request: its tokens, its blocks and how far it has come."""

import bisect
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jdllm.arrays import padded
from jdllm.decoding.caches import Phase, View, phase, policy_of
from jdllm.decoding.rules import adaptive_row, segment_row, step_table
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import StepTable, block_steps
from jdllm.decoding.transfer import Rule
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig


class Block(NamedTuple):
    """A block of semi-autoregressive remasking.

    - `start`, `stop`: its positions; masks before `start` may commit in it too, later ones may not.
    - `masks`: masked positions inside it when the request is made.
    - `table`: what its denoising steps may commit.
    """

    start: int
    stop: int
    masks: int
    table: StepTable


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds: waiting before the first step, denoising, and both."""

    queued: float
    running: float

    @property
    def total(self) -> float:
        return self.queued + self.running

    def to_dict(self) -> dict[str, float]:
        """All three, ready for JSON."""
        return {"queued": self.queued, "running": self.running, "total": self.total}


class Request:
    """The mutable state of one request. The engine alone changes it.

    - `prompt`: int32 ids that the request came with; masks among them are to be filled.
    - `tokens`: int32 `[length]`, the whole sequence as it stands: the prompt, then what is generated.
    - `initial_masks`: bool `[length]`, positions that were masked at the start; all others count as prompt.
    - `blocks`: what is denoised, from left to right.
    - `returned`: the part of the sequence that is the result.
    - `stop_ids`: ids that end its text; `decode`: ids to text, for the stop strings of `sampling`.
    - `logprobs`: f32 `[length]`, the log-probability of each committed token, 0 for others; `committed_in`:
      int32 `[length]`, the denoising step that committed it, -1 for others.
    - `steps`: denoising steps done, each one forward evaluation.
    - `forwarded`: with a cache the positions that steps of `Phase.REUSE` evaluate, rising; `stored`: how many
      rows of each layer they find stored.
    """

    def __init__(
        self,
        index: int,
        prompt: np.ndarray,
        gen_length: int,
        blocks: list[Block],
        sampling: SamplingParams,
        config: ModelConfig,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        self.index = index
        self.prompt = prompt
        self.mask_id = mask_id_of(config)
        self.tokens = np.concatenate([prompt, np.full(gen_length, self.mask_id, np.int32)])
        self.initial_masks = self.tokens == self.mask_id
        kept = min(sampling.max_tokens or gen_length, gen_length)
        self.returned = slice(len(prompt), len(prompt) + kept) if gen_length else slice(0, len(prompt))
        self.blocks = blocks
        self.sampling = sampling
        self.forwarded = np.arange(len(self.tokens))
        self.stored = 0
        self.stop_ids = (*config.stop_ids, *sampling.stop_token_ids) if gen_length else ()
        self.decode = decode
        self.logprobs = np.zeros(len(self.tokens), np.float32)
        self.committed_in = np.full(len(self.tokens), -1, np.int32)
        self.steps = 0
        self.block_step = 0
        self.history: list[np.ndarray] = []
        self.created = time.perf_counter()
        self.started: float | None = None
        self.ended: float | None = None
        self._block = 0
        self._segment = (adaptive_row if sampling.adaptive else segment_row)(sampling, config)
        self._shifted = config.logits_shift

    @property
    def segment(self) -> dict[str, np.ndarray | np.generic]:
        """What the next step needs to know of the sampling parameters."""
        if not self._forced:
            return self._segment
        surest = {
            "rule": np.int32(Rule.QUOTA),
            "plus_masked": np.bool_(False),
            "by_fraction": np.bool_(False),
        }
        return self._segment | surest

    @property
    def phase(self) -> Phase:
        """What the next step evaluates."""
        return phase(self.sampling, self.block_step)

    @property
    def cached(self) -> bool:
        return policy_of(self.sampling) is not None

    @property
    def adaptive(self) -> bool:
        """Whether its steps are those of adaptive parallel decoding."""
        return self.sampling.adaptive

    @property
    def reuse_steps(self) -> int:
        """Steps from the next one on until the block may have to be refreshed."""
        steps = range(self.block_step, self.block_step + self.steps_left)
        return next(
            (i for i, step in enumerate(steps) if phase(self.sampling, step) != Phase.REUSE), len(steps)
        )

    @property
    def _forced(self) -> bool:
        """Whether the next step commits the block's first token, and no other."""
        first = (
            self.sampling.effective("official_forcing")
            and self._shifted
            and self.cached
            and self.block_step == 0
        )
        return first and bool(self.tokens[self.block.start] == self.mask_id)

    def view(self) -> View:
        """The sequence as a cache policy sees it."""
        exact = self._shifted and not self.sampling.effective("official_forcing")
        start = max(self.block.start - 1, 0) if exact else self.block.start
        return View(len(self.tokens), start, self.block.stop, self.tokens == self.mask_id, exact)

    @property
    def guided(self) -> bool:
        """Whether each step also evaluates a copy that does not see the prompt."""
        return self.sampling.cfg_scale > 0

    @property
    def rows(self) -> int:
        """Packed rows of one step."""
        return len(self.tokens) * (2 if self.guided else 1)

    @property
    def block(self) -> Block:
        return self.blocks[self._block]

    @property
    def finished(self) -> bool:
        return self._block == len(self.blocks)

    @property
    def steps_left(self) -> int:
        """Steps left in the current block."""
        return len(self.block.table) - self.block_step

    def table_left(self, capacity: int) -> StepTable:
        """The next `capacity` steps of the current block's table, padded with zeros."""
        if self._forced:
            only = np.zeros(capacity, np.int32)
            only[0] = 1
            return StepTable(only, np.zeros(capacity, np.float32))
        rows = (column[self.block_step :][:capacity] for column in self.block.table)
        return StepTable(*(padded(row, capacity) for row in rows))

    def candidates(self) -> np.ndarray:
        """Positions that are masked and may commit in the next step, rising."""
        if self._forced:
            return np.array([self.block.start])
        masked = np.flatnonzero(self.tokens[: self.block.stop] == self.mask_id)
        return masked[: self.sampling.effective("max_lookahead")] if self.adaptive else masked

    def unguided_tokens(self) -> np.ndarray:
        """The sequence with everything masked that was not masked at the start."""
        return np.where(self.initial_masks, self.tokens, self.mask_id)

    def advance(self, positions: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Take in the tokens that one denoising step committed, and their log-probabilities."""
        self.tokens[positions] = tokens
        self.logprobs[positions] = logprobs
        self.committed_in[positions] = self.steps
        self.steps += 1
        self.block_step += 1
        if self.sampling.return_history:
            self.history.append(self.tokens.copy())
        while not self.finished and self._block_is_over():
            self._block = len(self.blocks) if self._text_is_over() else self._block + 1
            self.block_step = 0
        if self.finished:
            self.ended = time.perf_counter()

    def end_of_text(self) -> int | None:
        """Where in the result the text ends, if nothing is masked before: at its first stop id, or at the
        token that completes the first of its stop strings."""
        if self.mask_id in self.tokens[: self.returned.start]:
            return None
        result = self.tokens[self.returned]
        filled = result[: _first(result == self.mask_id)]
        end = _first((filled[:, None] == self.stop_ids).any(1))
        completed = self._stop_string_ends(filled[:end])
        return end if completed is None else completed

    def _stop_string_ends(self, ids: np.ndarray) -> int | None:
        """The index of the id that completes a stop string."""
        decode, stop = self.decode, self.sampling.stop
        if not stop or decode is None:
            return None

        def stopped(count: int) -> bool:
            text = decode(ids[:count].tolist())
            return any(string in text for string in stop)

        counts = range(len(ids) + 1)
        first = bisect.bisect_left(counts, True, key=stopped)
        return first - 1 if first in counts else None

    def timings(self) -> Timings:
        ended = self.ended or time.perf_counter()
        started = self.started or ended
        return Timings(queued=started - self.created, running=ended - started)

    def _block_is_over(self) -> bool:
        filled = self.mask_id not in self.tokens[: self.block.stop]
        return self.steps_left <= 0 or filled or (self.adaptive and self._result_is_complete())

    def _result_is_complete(self) -> bool:
        return self._text_is_over() or self.mask_id not in self.tokens[: self.returned.stop]

    def _text_is_over(self) -> bool:
        return self.sampling.early_stop and self.end_of_text() is not None


def generation_request(
    index: int,
    prompt: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    config: ModelConfig,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Request:
    """A request that appends `sampling.gen_length` masks to `prompt` and fills them block by block, as far as
    `max_tokens` reaches.

    `decode`: ids to text, for stop strings.

    Raises `RequestError` for an empty prompt, an id outside the vocabulary, a mask id in the prompt (unless
    `prompt_masks` is "official"), lengths that do not divide, or stop strings without `decode`.
    """
    if sampling.stop and decode is None:
        raise RequestError("stop strings need tokenizer files, which this model has not: use stop_token_ids")
    for i in sampling.stop_token_ids:
        if i >= config.vocab_size:
            raise RequestError(
                f"stop_token_ids has {i}, outside the vocabulary (0 to {config.vocab_size - 1})"
            )
    prompt = checked_ids(prompt, config)
    mask_id = mask_id_of(config)
    if sampling.prompt_masks == "error" and (prompt == mask_id).any():
        at = int(np.flatnonzero(prompt == mask_id)[0])
        raise RequestError(
            f"the prompt contains the mask id {mask_id} at position {at}: remove it, use infill, or set"
            " prompt_masks='official' to have it filled as the official sampler does"
        )
    gen_length = sampling.gen_length
    block_length = sampling.block_length or gen_length
    steps = block_steps(gen_length, sampling.steps or gen_length, block_length)
    start = len(prompt)
    # Dream's sampler without a cache has one block, which counts the masks of the prompt too.
    masks = block_length if sampling.alg is None else block_length + int((prompt == mask_id).sum())
    table = step_table(sampling, masks, steps, start + gen_length)
    blocks = [
        Block(at, at + block_length, block_length, table)
        for at in range(start, start + (sampling.max_tokens or gen_length), block_length)
    ]
    return Request(index, prompt, gen_length, blocks, sampling, config, decode)


def infill_request(
    index: int,
    tokens: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    config: ModelConfig,
) -> Request:
    """A request that fills the masks inside `tokens`.

    The masked positions, in order, are cut into blocks of `block_length` masks (the last may be shorter);
    each block is finished before the next. `gen_length`, `max_tokens` and `early_stop` do not apply; `steps`
    defaults to one a mask, and is otherwise a multiple of the number of blocks. Raises `RequestError` as
    `generation_request` does, where nothing is masked, and for stop strings or ids.
    """
    if sampling.stop or sampling.stop_token_ids:
        raise RequestError("a sequence to infill has no end to stop at: leave stop and stop_token_ids out")
    tokens = checked_ids(tokens, config)
    masks = np.flatnonzero(tokens == mask_id_of(config))
    if not len(masks):
        raise RequestError(f"nothing to infill: the sequence has no mask id {config.mask_id}")
    length = sampling.block_length or len(masks)
    groups = [masks[at : at + length] for at in range(0, len(masks), length)]
    if sampling.steps is not None and sampling.steps % len(groups):
        raise RequestError(
            f"steps {sampling.steps} is not divisible by the number of blocks {len(groups)}"
            f" ({len(masks)} masks / block_length {length})"
        )
    blocks = []
    for group in groups:
        steps = sampling.steps // len(groups) if sampling.steps else len(group)
        table = step_table(sampling, len(group), steps, len(masks))
        blocks.append(Block(int(group[0]), int(group[-1]) + 1, len(group), table))
    return Request(index, tokens, 0, blocks, sampling, config)


def _first(found: np.ndarray) -> int | None:
    """The index of the first True, if there is one."""
    return int(found.argmax()) if found.any() else None


def mask_id_of(config: ModelConfig) -> int:
    """The mask id, or `RequestError` where the checkpoint does not name one."""
    if config.mask_id is None:
        raise RequestError(
            "the model has no mask id (mask_token_id in config.json): it cannot denoise;"
            " name it with hf_overrides={'mask_token_id': ...} if the checkpoint has one"
        )
    if config.mask_id >= config.vocab_size:
        raise RequestError(
            f"the mask id {config.mask_id} (mask_token_id in config.json) is outside the vocabulary"
            f" (0 to {config.vocab_size - 1})"
        )
    return config.mask_id


def checked_ids(ids: Sequence[int] | np.ndarray, config: ModelConfig) -> np.ndarray:
    """`ids` as int32 `[length]`; `RequestError` where they are no flat list of ids of the vocabulary."""
    try:
        ids = np.asarray(ids)
    except ValueError:
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise RequestError("token ids must be a flat list of integers, one list for each prompt")
    if not ids.size:
        raise RequestError("the prompt is empty: give at least one token")
    outside = (ids < 0) | (ids >= config.vocab_size)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise RequestError(
            f"token id {ids[at]} at position {at} is outside the vocabulary (0 to {config.vocab_size - 1})"
        )
    return ids.astype(np.int32)
