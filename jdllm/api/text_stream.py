"""The text of a request while it is denoised: what is committed from its beginning on, never taken back."""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.encoded_trace import LISTED
from jdllm.outputs import top_of
from jdllm.serving.spec import RequestSpec
from jdllm.serving.updates import StepUpdate


class Delta(NamedTuple):
    """What came to a text.

    - `text`: new characters.
    - `tokens`: ids of the generated tokens that are reported for the first time, their log-probabilities, the
      steps that committed them, and the place in the whole text where each begins.
    - `tops`: for each of these tokens the likeliest ids in its place with their log-probabilities.
    """

    text: str
    tokens: tuple[list[int], list[float], list[int], list[int]]
    tops: list[dict[int, float]] | None


class TextStream:
    """The beginning of a request's answer that cannot change any more.

    Blocks are finished from left to right, but inside a block tokens are committed in any order. So what is
    told is what is committed without a gap, as far as no later step may replace it. A character that is cut
    between tokens, and what may be the beginning of a stop string, wait for what follows, and so do their
    tokens.

    Arguments:
    - `spec`: the request.
    - `tokenizer`: of the model; without one there is no text.

    `text` is what was told so far, `tokens_told` the generated tokens that it took.
    """

    def __init__(self, spec: RequestSpec, tokenizer: Tokenizer | None):
        self._tokens = spec.tokens.copy()
        self._returned, self._mask_id = spec.returned, spec.mask_id
        self._ends, self._cut = spec.stop_ids, spec.sampling.early_stop
        self._stop = spec.sampling.stop
        self._tokenizer = tokenizer
        self._logprobs = np.zeros(len(self._tokens), np.float32)
        self._steps = np.full(len(self._tokens), -1, np.int32)
        self._settled: int | None = None
        self._listed = spec.sampling.listed
        self._likeliest = np.zeros((len(self._tokens), self._listed), LISTED)
        self._whole = ""
        self._offsets: list[int] = []
        self.text = ""
        self.tokens_told = 0

    def take(self, update: StepUpdate) -> Delta:
        """What a denoising step brings."""
        positions = update.positions[update.committed]
        self._tokens[positions] = update.provisional[update.committed]
        self._logprobs[positions] = update.logprobs[update.committed]
        self._steps[positions] = update.step
        self._settled = update.settled
        if self._listed:
            self._likeliest[positions] = update.likeliest[update.committed]
        tokens = self._committed()
        complete = self._read(tokens)
        certain = self._certain()
        waits = certain < len(self._whole) or not complete
        told = bisect_left(self._offsets, certain) if waits else len(tokens)
        return self._delta(self._whole[:certain], max(told, self.tokens_told))

    def finish(self, text: str, tokens: int) -> Delta:
        """What the whole answer has beyond what was told: its text and the number of its tokens."""
        return self._delta(text, tokens)

    def _delta(self, text: str, tokens: int) -> Delta:
        first, told = self._returned.start, min(self.tokens_told, tokens)
        place = slice(first + told, first + tokens)
        self.tokens_told = tokens
        new = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text += new
        ids, logprobs, steps = (
            column[place].tolist() for column in (self._tokens, self._logprobs, self._steps)
        )
        known = self._offsets[told:tokens]
        offsets = [min(at, len(text)) for at in [*known, *[len(text)] * (len(ids) - len(known))]]
        tops = list(map(top_of, self._likeliest[place], ids, logprobs)) if self._listed else None
        return Delta(new, (ids, logprobs, steps, offsets), tops)

    def _committed(self) -> np.ndarray:
        """The result up to its first mask or token that may change, or to the id that ends it where nothing
        comes behind."""
        result = self._tokens[self._returned]
        over = result == self._mask_id
        if self._settled is not None:
            over[max(self._settled - self._returned.start, 0) :] = True
        if self._cut:
            over |= np.isin(result, self._ends)
        return result[: _first(over)]

    def _read(self, tokens: np.ndarray) -> bool:
        """Take in the text of a result up to its end; whether that is not inside a character."""
        if self._tokenizer is None:
            return True
        end = _first(np.isin(tokens, self._ends))
        start, read = self._returned.start, len(self._offsets)
        new, before = tokens[read:end], self._tokens[: start + read]
        self._offsets += [len(self._whole) + at for at in self._tokenizer.offsets(new, before)]
        self._whole += self._tokenizer.decode(new, before, final=False)
        return not self._tokenizer.decode((), self._tokens[: start + len(self._offsets)])

    def _certain(self) -> int:
        """How many characters of the text can neither change nor be cut off."""
        ends = [at for stop in self._stop if (at := self._whole.find(stop, len(self.text))) >= 0]
        if ends:
            return min(ends)
        return len(self._whole) - max((_overlap(self._whole, stop) for stop in self._stop), default=0)


def _first(found: np.ndarray) -> int | None:
    """The index of the first True, if there is one."""
    return int(found.argmax()) if found.any() else None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
