"""Block diffusion once more: slow, one sequence, no cache, NumPy float64."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tests.decoding.slow_rules import Asked, Rule, committed

Logits = Callable[[np.ndarray, int], np.ndarray]
"""(ids of whole blocks, length of a block) -> logits of each row."""


def generate(
    logits_of: Logits,
    prompt: np.ndarray,
    masks: int,
    block_length: int,
    mask_id: int,
    *,
    rule: Rule = Rule.QUOTA,
    steps: int | None = None,
    threshold: float = 0.9,
    editing: float | None = None,
    post: int = 16,
    small: int | None = None,
) -> list[np.ndarray]:
    """The sequence after each step.

    Arguments:
    - `prompt`: int32 ids.
    - `masks`: how many tokens to generate; the sequence ends with the block of the last of them.
    - `steps`: of a block, by default one for each of its positions.
    - `editing`: the probability above which a filled token is replaced, `None` for no editing; `post`: how
      many steps may follow the last mask of a block.
    - `small`: positions that are filled together, by default those of a block.
    """
    stop = -(-(len(prompt) + masks) // block_length) * block_length
    tokens = np.concatenate([prompt, np.full(stop - len(prompt), mask_id)])
    length = small or block_length
    places = [
        (start, start + length)
        for start in range(len(prompt) // length * length, len(prompt) + masks, length)
    ]
    fill = Filling(logits_of, block_length, mask_id, rule, steps or length, threshold, editing, post)
    return [state for start, end in places for state in fill(tokens, start, end, length)]


def infill(
    logits_of: Logits,
    text: np.ndarray,
    block_length: int,
    mask_id: int,
    *,
    rule: Rule = Rule.QUOTA,
    steps: int | None = None,
    threshold: float = 0.9,
    editing: float | None = None,
    post: int = 16,
    small: int | None = None,
    foretold: bool = False,
) -> list[np.ndarray]:
    """The sequence after each step. Blocks without masks are passed over, and masks behind the text stay.

    Arguments:
    - `text`: int32 ids with masks; others as `generate` has them.
    - `foretold`: the block before gives the first token of each block, in a step of its own.
    """
    tokens = np.pad(text, (0, -len(text) % block_length), constant_values=mask_id)
    length, states = small or block_length, []
    fill = Filling(logits_of, block_length, mask_id, rule, steps or length, threshold, editing, post)
    for start in range(0, len(text), length):
        end = min(start + length, len(text))
        if foretold and start % block_length == 0 and tokens[start] == mask_id:
            tokens[start] = fill.logits(tokens, start)[start].argmax()
            states.append(tokens.copy())
        states += fill(tokens, start, end, length)
    return states


class Filling(NamedTuple):
    """How the masks of a block, or of a part of one, are filled."""

    logits_of: Logits
    block_length: int
    mask_id: int
    rule: Rule
    steps: int
    threshold: float
    editing: float | None
    post: int

    def logits(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Of the block that `start` is in, and of all before it."""
        seen = (start // self.block_length + 1) * self.block_length
        return self.logits_of(tokens[:seen], self.block_length).astype(np.float64)

    def __call__(self, tokens: np.ndarray, start: int, end: int, length: int) -> Iterator[np.ndarray]:
        """Fill the masks of `tokens` from `start` to `end`, in steps for `length` positions, and yield the
        sequence after each step."""
        given, left = tokens[start:end] != self.mask_id, 0 if self.editing is None else self.post
        if given.all():
            return
        for step in itertools.count():
            rows = start + np.flatnonzero(tokens[start:end] == self.mask_id)
            if not len(rows) and not left:
                break
            logits = self.logits(tokens, start)[start:end]
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            best, sure = logits.argmax(axis=1), (weights / weights.sum(axis=1, keepdims=True)).max(axis=1)
            before = tokens[start:end].copy()
            if len(rows):
                quota = length // self.steps + (step < length % self.steps)
                order = sure[rows - start].tolist()
                asked = Asked(quota=quota, threshold=self.threshold)
                taken = rows[committed(self.rule, order, order, [], asked)]
                tokens[taken] = best[taken - start]
            if self.editing is not None:
                changed = ~given & (before != self.mask_id) & (before != best) & (sure > self.editing)
                tokens[start:end][changed] = best[changed]
                if not len(rows):
                    left = left - 1 if changed.any() else 0
            yield tokens.copy()
