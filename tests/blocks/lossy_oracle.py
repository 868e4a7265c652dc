"""Lossy self-speculation once more: slow, one sequence, no cache, NumPy float64."""

from collections.abc import Callable, Iterator

import numpy as np
from scipy.special import log_softmax

from jdllm.decoding.sampling import SamplingParams
from tests.decoding.numpy_noise import position_bits, uniform
from tests.decoding.slow_rules import Asked, Rule, committed

SeenLogits = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(ids, the row behind the last one that each sees) -> logits of each row."""

_ACCEPTANCE = 4


class Lossy:
    """A request.

    Arguments:
    - `logits_of`: of the model, in which a row sees all rows before some row.
    - `sampling`: what is asked.
    - `length`: positions of a block.
    - `mask_id`: of the model.
    """

    def __init__(self, logits_of: SeenLogits, sampling: SamplingParams, length: int, mask_id: int):
        self.logits_of, self.sampling, self.options = logits_of, sampling, sampling.options
        self.length, self.mask_id = length, mask_id
        self.on = False
        self.evaluations = 0

    def generate(self, prompt: np.ndarray) -> Iterator[np.ndarray]:
        """The sequence after each evaluation that drafts or verifies."""
        stop = -(-(len(prompt) + self.sampling.gen_length) // self.length) * self.length
        tokens = np.concatenate([prompt, np.full(stop - len(prompt), self.mask_id)])
        blocks = -(-self.sampling.gen_length // self.length)
        steps = (self.sampling.steps or blocks * self.length) // blocks
        for start in range(len(prompt) // self.length * self.length, stop, self.length):
            for step in range(steps):
                if self.mask_id in tokens[start : start + self.length]:
                    yield from self.round(tokens, start, self.length // steps + (step < self.length % steps))

    def round(self, tokens: np.ndarray, start: int, quota: int) -> Iterator[np.ndarray]:
        """Draft, perhaps verify, and commit."""
        stop, threshold = start + self.length, self.options["threshold"]
        masks = (start + np.flatnonzero(tokens[start:stop] == self.mask_id)).tolist()
        logs = self.logprobs(tokens[:stop], start, masks[0] if self.options["causal_rows"] else start)
        best, sure = logs.argmax(axis=1), np.exp(logs.max(axis=1))
        entropy = -(np.exp(logs) * logs).sum(axis=1) / np.log(logs.shape[1])
        self.evaluations += 1
        span = [row for i, row in enumerate(masks) if row == masks[0] + i]
        above = [row for row in masks if sure[row] > threshold]
        taken: list[int] = []
        if self.worth_it(entropy[span], len(above)):
            yield tokens.copy()
            filled = tokens.copy()
            filled[masks] = best[masks]
            taken = list(self.accepted(filled, span, sure))
            self.evaluations += 1
            if self.options["commit_sure"]:
                taken += [row for row in above if row not in taken]
        missing, left = min(quota, len(masks)) - len(taken), [row for row in masks if row not in taken]
        if missing > 0:
            order = sure[left].tolist()
            asked = Asked(quota=missing, threshold=threshold)
            taken += [left[i] for i in committed(Rule.DYNAMIC, order, order, [], asked)]
        tokens[taken] = best[taken]
        yield tokens.copy()

    def worth_it(self, entropy: np.ndarray, above: int) -> bool:
        of = self.options
        chances = np.cumprod(np.exp(-of["verify_sharpness"] * entropy))
        score = chances.sum() - of["verify_cost"] * (above if of["verify_cost_each"] else 1)
        if of["verify_policy"] == "span":
            return len(entropy) >= of["verify_span"]
        if of["verify_policy"] == "score":
            return score >= of["verify_score"]
        self.on = score >= of["verify_off"] if self.on else score > of["verify_on"]
        return self.on

    def accepted(self, filled: np.ndarray, span: list[int], sure: np.ndarray) -> Iterator[int]:
        """Rows up to the first that is rejected, each verified in an evaluation of its own."""
        start = span[0] // self.length * self.length
        for row in span:
            alone = np.append(filled[:row], self.mask_id)
            log = self.logprobs(alone, start, row + 1)[row, filled[row]]
            yield row
            bits = position_bits(self.sampling.seed or 0, _ACCEPTANCE, self.evaluations, row)
            if uniform(bits) >= min(1, np.exp(log) / sure[row]):
                return

    def logprobs(self, tokens: np.ndarray, start: int, causal: int) -> np.ndarray:
        """float64 log-probabilities.

        Arguments:
        - `start`: of the last block; rows before it see as they are stored.
        - `causal`: the row before which rows of the last block see only what is before them.
        """
        rows = np.arange(len(tokens))
        ends = (rows // self.length + 1) * self.length
        every = start if self.options["causal_rows"] else 0
        ends = np.where((rows < every) | ((rows >= start) & (rows < causal)), rows + 1, ends)
        return log_softmax(self.logits_of(tokens, ends.astype(np.int32)).astype(np.float64), axis=1)
