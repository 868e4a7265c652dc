"""The text of a request while it is denoised: what is committed from its beginning on, never taken back."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jdllm.serving.spec import RequestSpec
from jdllm.serving.updates import StepUpdate

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Delta(NamedTuple):
    """What came to a text.

    - `text`: new characters.
    - `tokens`: ids of the generated tokens that are told of for the first time, their log-probabilities, and
      the steps that committed them.
    """

    text: str
    tokens: tuple[list[int], list[float], list[int]]


class TextStream:
    """The beginning of a request's answer that cannot change any more.

    Blocks are finished from left to right, but inside a block tokens are committed in any order. So what is
    told is what is committed without a gap. A character that is cut between tokens, and what may be the
    beginning of a stop string, wait for what follows.

    Arguments:
    - `spec`: the request.
    - `decode`: ids to text.

    `text` is what was told so far, `tokens_told` the generated tokens that it took.
    """

    def __init__(self, spec: RequestSpec, decode: Callable[[Sequence[int]], str]):
        self._tokens = spec.tokens.copy()
        self._returned, self._mask_id = spec.returned, spec.mask_id
        self._ends, self._cut = spec.stop_ids, spec.sampling.early_stop
        self._stop = spec.sampling.stop
        self._decode = decode
        self._logprobs = np.zeros(len(self._tokens), np.float32)
        self._steps = np.full(len(self._tokens), -1, np.int32)
        self.text = ""
        self.tokens_told = 0

    def take(self, update: StepUpdate) -> Delta:
        """What a denoising step brings."""
        positions = update.positions[update.committed]
        self._tokens[positions] = update.provisional[update.committed]
        self._logprobs[positions] = update.logprobs[update.committed]
        self._steps[positions] = update.step
        tokens = self._committed()
        if len(tokens) <= self.tokens_told:
            return Delta("", ([], [], []))
        text, stopped = self._certain(self._decode(tokens[: _first(np.isin(tokens, self._ends))].tolist()))
        return self._delta(text, self.tokens_told if stopped else len(tokens))

    def finish(self, text: str, tokens: int) -> Delta:
        """What the whole answer has beyond what was told: its text and the number of its tokens."""
        return self._delta(text, tokens)

    def _delta(self, text: str, tokens: int) -> Delta:
        first = self._returned.start
        place = slice(first + min(self.tokens_told, tokens), first + tokens)
        self.tokens_told = tokens
        new = text[len(self.text) :] if len(text) > len(self.text) and text.startswith(self.text) else ""
        self.text += new
        columns = (column[place].tolist() for column in (self._tokens, self._logprobs, self._steps))
        return Delta(new, tuple(columns))

    def _committed(self) -> np.ndarray:
        """The result up to its first mask, or to the id that ends it where nothing comes behind."""
        result = self._tokens[self._returned]
        over = result == self._mask_id
        if self._cut:
            over |= np.isin(result, self._ends)
        return result[: _first(over)]

    def _certain(self, text: str) -> tuple[str, bool]:
        """`text` without what may still change or be cut off, and whether a stop string ends it."""
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            return text[: min(ends)], True
        text = text.rstrip(_INCOMPLETE)
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        return text[: len(text) - held], False


def _first(found: np.ndarray) -> int | None:
    """The index of the first True, if there is one."""
    return int(found.argmax()) if found.any() else None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
