"""One request as it runs: its tokens and how far it has come."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jdllm.decoding.cache_policies import Phase, phase, steps_to_refresh
from jdllm.decoding.caches.policy import View
from jdllm.decoding.encoded_trace import LISTED, Steps
from jdllm.decoding.registry import number_of
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import StepTable, quotas
from jdllm.decoding.transfer.quota import QUOTA
from jdllm.prefilling.prefilled import Prefilled
from jdllm.serving.auto_spec import Way
from jdllm.serving.progress import Awaited, Progress
from jdllm.serving.spec import Block, RequestSpec
from jdllm.serving.stop_strings import StopStrings
from jdllm.serving.timings import Timings


class Request:
    """The state of one request, which only commits change: `advance`, `advance_many`, `store`, `go_back`.

    - `id`: of the request in its engine.
    - `spec`: the request as it was asked.
    - `tokens`: int32 `[length]`, the whole sequence as it stands.
    - `initial_masks`: bool `[length]`, positions that were masked at the start; all others count as prompt.
    - `logprobs`: f32 `[length]`, the log-probability of each committed token, 0 for others; `committed_in`:
      int32 `[length]`, the denoising step that committed it, -1 for others.
    - `likeliest`: `LISTED` `[length, listed]`, the likeliest ids at each committed position, as many as were
      asked for.
    - `steps`: denoising steps done, each one forward evaluation.
    - `known`, `computed`: where rows depend on no later token, how many first tokens are there, and of how
      many of them keys and values are stored; 0 for others, whose rows nobody can share.
    - `content`: what its rows depend on beside their tokens: rows are shared by requests that agree in it.
    - `found`: how many rows were stored already when it was admitted, `None` where rows cannot be shared.
    - `way`: how it generates, where the engine has chosen this; `None` where the request says how.
    - `prefilled`: how its long context was prepared, `None` without one.
    - `prepared`: whether the steps of the current block may run.
    - `awaited`: of a copy that is one part ahead (`jdllm.serving.ahead`), the tokens that this part commits;
      `None` for others.
    - `acceptance`: the part of its transfer rule that runs on the device, `None` where another model decides;
      `rule_state`: what the rule carries from step to step of a block, by name, of the whole request or
      `[length]`.
    - `matcher`: follows an answer of a given form, `None` for other requests.
    - `post_left`: how many more steps the current block may take without a mask, 0 where nothing is edited;
      `edits`: how many committed tokens were replaced.
    - `created`, `ready`, `started`, `committed`, `ended`: seconds of `time.perf_counter` at which it arrived,
      could be served the last time, was admitted, had its first tokens, and ended.
    - `forwarded`: with a cache the positions that steps of `Phase.REUSE` evaluate, rising; `stored`: how many
      rows of each layer they find stored, or of each page.
    """

    known = computed = 0
    content = b""
    found: int | None = None
    way: Way | None = None
    prefilled: Prefilled | None = None
    prepared = True
    awaited: Awaited | None = None
    post_left = edits = 0

    def __init__(self, spec: RequestSpec, id: int = 0):
        self.matcher = spec.matcher()
        self.id = id
        self.spec = spec
        self.tokens = spec.tokens.copy()
        self.initial_masks = self.tokens == spec.mask_id
        self.forwarded = np.arange(len(self.tokens))
        self.stored: int | np.ndarray = 0
        self.logprobs = np.zeros(len(self.tokens), np.float32)
        self.likeliest = np.zeros((len(self.tokens), self.sampling.listed), LISTED)
        self.committed_in = np.full(len(self.tokens), -1, np.int32)
        self.steps = self.block_step = 0
        self.history: list[np.ndarray] = []
        self.created = self.ready = time.perf_counter()
        self.started: float | None = None
        self.committed: float | None = None
        self.ended: float | None = None
        self._block = 0
        stop = spec.sampling.stop
        self._stops = StopStrings(stop, spec.decode) if stop and spec.decode is not None else None
        self.acceptance = spec.acceptance
        self.rule_state = self._initial_state()
        self._found_state: Mapping[str, np.ndarray] | None = None
        self._refreshed = self._progress()

    @property
    def prompt(self) -> np.ndarray:
        return self.spec.prompt

    @property
    def sampling(self) -> SamplingParams:
        return self.spec.sampling

    @property
    def mask_id(self) -> int:
        return self.spec.mask_id

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.spec.blocks

    @property
    def returned(self) -> slice:
        return self.spec.returned

    @property
    def cached(self) -> bool:
        return self.spec.cached

    @property
    def adaptive(self) -> bool:
        return self.spec.adaptive

    @property
    def guided(self) -> bool:
        return self.spec.guided

    @property
    def evaluated(self) -> np.ndarray:
        """Positions that full steps and refreshes of the current block evaluate, rising."""
        return self.spec.evaluated(self.block)

    @property
    def segment(self) -> Mapping[str, Any]:
        """What the next step needs to know of the sampling parameters."""
        if not self._forced:
            return self.spec.segment
        surest = {
            "rule": np.int32(number_of(QUOTA)),
            "plus_masked": np.bool_(False),
            "by_fraction": np.bool_(False),
        }
        return {**self.spec.segment, **surest}

    @property
    def phase(self) -> Phase:
        """What the next step evaluates."""
        return phase(self.sampling, self.block_step, self._block)

    @property
    def reuse_steps(self) -> int:
        """Steps from the next one on until the block may have to be refreshed."""
        due = steps_to_refresh(self.sampling, self.block_step, self._block)
        return self.steps_left if due is None else min(due, self.steps_left)

    @property
    def _forced(self) -> bool:
        """Whether the next step commits the block's first token, and no other."""
        return (
            self.spec.forces_first
            and self.block_step == 0
            and bool(self.tokens[self.block.start] == self.mask_id)
        )

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """The rotary positions of some of its tokens."""
        return rows

    def view(self) -> View:
        """The sequence as a cache policy sees it."""
        exact = self.spec.shifted and not self.sampling.effective("official_forcing")
        start = max(self.block.start - 1, 0) if exact else self.block.start
        masked, options = self.tokens == self.mask_id, self.sampling.options
        return View(len(self.tokens), start, self.block.stop, masked, exact, options)

    @property
    def block(self) -> Block:
        return self.blocks[self._block]

    @property
    def finished(self) -> bool:
        return self._block == len(self.blocks)

    @property
    def goes_on(self) -> bool:
        """Whether a step may enter the next block before the host has seen the tokens of this one."""
        return False

    @property
    def steps_left(self) -> int:
        """Steps left in the current block."""
        return len(self.block.table) - self.block_step

    def table_left(self, most: int) -> StepTable:
        """The next steps of the current block's table, `most` at most."""
        if self._forced:
            return quotas(np.ones(1, np.int32))
        return StepTable(*(column[self.block_step :][:most] for column in self.block.table))

    def masked(self) -> np.ndarray:
        """Positions that steps of the current block may fill and have not, rising."""
        return np.flatnonzero(self.tokens[: self.block.stop] == self.mask_id)

    def candidates(self) -> np.ndarray:
        """Positions that are masked and may commit in the next step, rising."""
        if self._forced:
            return np.array([self.block.start])
        masked = self.masked()
        return masked[: self.sampling.effective("max_lookahead")] if self.adaptive else masked

    def shown(self, positions: np.ndarray, step: Steps) -> np.ndarray:
        """Which of the head rows of a step are reported: the rows that were masked before it."""
        return self.tokens[positions] == self.mask_id

    @property
    def settled(self) -> int | None:
        """The first position from which on a step may replace committed tokens; `None` where none does."""
        return None

    def sequences(self) -> Iterator[np.ndarray]:
        """What its steps evaluate, as things stand: token ids of whole sequences."""
        yield self.tokens
        if self.guided:
            yield self.unguided_tokens()

    def unguided_tokens(self) -> np.ndarray:
        """The sequence with everything masked that was not masked at the start."""
        return np.where(self.initial_masks, self.tokens, self.mask_id)

    def advance(
        self,
        positions: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        likeliest: np.ndarray | None = None,
    ) -> None:
        """Take in the tokens that one denoising step committed, and their log-probabilities.

        Arguments:
        - `likeliest`: `LISTED` `[committed, listed]`, where the request asked for them.
        """
        self._commit(1, 0, positions, tokens, logprobs, likeliest)

    def advance_many(self, positions: np.ndarray, steps: Steps) -> None:
        """Take in several denoising steps of one block.

        Arguments:
        - `positions`: int32 `[head]`, of the head rows.
        - `steps`: what the device did with them; the block is not over before the last one.
        """
        if self.sampling.return_history:
            for each in map(Steps, *steps):
                self.advance(*of_committed(positions, each))
            return
        step, row = steps.committed.nonzero()
        tokens, logprobs = steps.tokens[step, row], steps.logprobs[step, row]
        likeliest = steps.likeliest[step, row] if self.sampling.listed else None
        self._commit(len(steps.tokens), step, positions[row], tokens, logprobs, likeliest)

    def _commit(
        self,
        count: int,
        step: np.ndarray | int,
        positions: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        likeliest: np.ndarray | None,
    ) -> None:
        """Take in `count` steps; `step` says in which of them each of `positions` was committed."""
        if self.matcher is not None:
            self.matcher.take(tokens)
        self.tokens[positions] = tokens
        self.logprobs[positions] = logprobs
        if likeliest is not None:
            self.likeliest[positions] = likeliest[:, : self.sampling.listed]
        self.committed_in[positions] = self.steps + step
        self.steps += count
        self.block_step += count
        if self._found_state is not None:
            self.rule_state, self._found_state = self._found_state, None
        if self.sampling.return_history:
            self.history.append(self.tokens.copy())
        while not self.finished and self._block_is_over():
            self._block = len(self.blocks) if self._text_is_over() else self._block + 1
            self.block_step = 0
            self.rule_state = self._initial_state()
            if self.spec.refreshes_once and not self.finished:
                # The block may evaluate further masks, and no refresh tells which rows are forwarded.
                evaluated = self.evaluated
                self.forwarded = evaluated[evaluated >= self.forwarded[0]]
        if self.committed is None and len(positions):
            self.committed = time.perf_counter()
        if self.finished:
            self.ended = time.perf_counter()

    def pass_over(self, steps: int) -> None:
        """Count steps whose tokens have not been seen: of a copy alone."""
        self.steps += steps
        self.block_step += steps

    def enter_next(self) -> None:
        """Go on to the next block, whatever this one's tokens are: of a copy alone, which `goes_on`."""
        self._block, self.block_step, self.rule_state = self._block + 1, 0, self._initial_state()

    def store(self, forwarded: np.ndarray, stored: int) -> None:
        """Take in what a refresh stored, before the step that it was: `go_back` leads here."""
        self.forwarded, self.stored = forwarded, stored
        self._refreshed = self._progress()

    def find_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take in what its rule carries after the steps that are taken in next."""
        self._found_state = state

    def find(self, rows: int) -> None:
        """Take in that so many of its first rows are stored already; 0 where rows cannot be shared."""

    def go_back(self) -> None:
        """Go back to the last refresh, or to the beginning of the request: its stored keys are lost.

        Steps from there on, whose noise is keyed by their number, commit the same tokens again.
        """
        now = self._refreshed
        self.tokens, self.logprobs, self.committed_in = (x.copy() for x in now[:3])
        self.steps, self.block_step, self._block, self.rule_state = now[3:]
        self._found_state = None
        del self.history[self.steps :]

    def _progress(self) -> Progress:
        return Progress(
            self.tokens.copy(),
            self.logprobs.copy(),
            self.committed_in.copy(),
            self.steps,
            self.block_step,
            self._block,
            self.rule_state,
        )

    def _initial_state(self) -> Mapping[str, np.ndarray]:
        arrays = () if self.acceptance is None else self.acceptance.state
        return {
            array.name: np.full(len(self.tokens) if array.per_row else (), array.initial, array.dtype)
            for array in arrays
        }

    def end_of_text(self) -> int | None:
        """Where in the result the text ends, if nothing is masked before: at its first stop id, or at the
        token that completes the first of its stop strings."""
        if not self._prompt_is_filled():
            return None
        result = self.tokens[self.returned]
        filled = result[: _first(result == self.mask_id)]
        end = _first((filled[:, None] == self.spec.stop_ids).any(1))
        if self._stops is None:
            return end
        start, count = self.returned.start, len(filled) if end is None else end
        completed = self._stops.completed_at(self.tokens, start, start + count)
        return end if completed is None else completed

    def _prompt_is_filled(self) -> bool:
        """Whether no mask that is to be filled is left before the result."""
        return self.mask_id not in self.tokens[: self.returned.start]

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


def of_class[R: Request](kind: type[R], requests: Sequence[Request]) -> list[R]:
    """The requests of a part, for a room whose parts hold requests of one class only."""
    own = [request for request in requests if isinstance(request, kind)]
    assert len(own) == len(requests)
    return own


def of_committed(positions: np.ndarray, step: Steps) -> tuple[np.ndarray, ...]:
    """What `Request.advance` takes in of one step.

    Arguments:
    - `positions`: int32 `[head]`, of the head rows.
    """
    took = step.committed
    return positions[took], step.tokens[took], step.logprobs[took], step.likeliest[took]


def _first(found: np.ndarray) -> int | None:
    """The index of the first True, if there is one."""
    return int(found.argmax()) if found.any() else None
