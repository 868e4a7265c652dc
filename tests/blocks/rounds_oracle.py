"""Self-speculation with shifted logits once more: one sequence, no cache, whole evaluations."""

from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax

from tests.blocks.lossy_oracle import SeenLogits
from tests.decoding.slow_rules import Asked, Rule, committed


class Rounds(NamedTuple):
    """A model with shifted logits that drafts and verifies.

    - `logits_of`: of the model, in which a row sees all rows before some row.
    - `threshold`: that tokens of a draft reach; `None` where one evaluation drafts all.
    """

    logits_of: SeenLogits
    mask_id: int
    threshold: float | None

    def __call__(self, prompt: np.ndarray, count: int, length: int) -> tuple[list[int], int]:
        """So many tokens behind a prompt, and the evaluations that they took."""
        known, evaluations = prompt.tolist(), 0
        while len(known) < len(prompt) + count:
            tokens, drafted = self.draft(known, length)
            found = self.logits_of(tokens, np.arange(len(tokens)) + 1).argmax(axis=1)
            first = len(known)
            while len(known) < len(tokens) and tokens[len(known)] == found[len(known) - 1]:
                known.append(int(tokens[len(known)]))
            known.append(int(found[len(known) - 1]))
            assert first < len(known) <= first + length
            evaluations += drafted + 1
        return known[len(prompt) :][:count], evaluations

    def draft(self, known: list[int], length: int) -> tuple[np.ndarray, int]:
        """The known tokens with a draft, whose rows and the last known one see each other."""
        tokens, evaluations = np.array(known + [self.mask_id] * (length - 1)), 0
        row = np.arange(len(tokens))
        ends = np.where(row < len(known) - 1, row + 1, len(tokens))
        while len(rows := np.flatnonzero(tokens == self.mask_id)):
            logs = log_softmax(self.logits_of(tokens, ends)[rows - 1].astype(np.float64), axis=1)
            logs[:, self.mask_id] = -np.inf
            sure = np.exp(logs.max(axis=1)).tolist()
            taken = list(range(len(rows)))
            if self.threshold is not None:
                taken = committed(Rule.THRESHOLD, sure, sure, [], Asked(threshold=self.threshold))
            tokens[rows[taken]] = logs.argmax(axis=1)[taken]
            evaluations += 1
        return tokens, evaluations
