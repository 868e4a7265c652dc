"""Block diffusion once more: slow, one sequence, no cache, NumPy float64."""

import itertools
from collections.abc import Callable

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
    steps, states = steps or length, []
    for start in range(len(prompt) // length * length, len(prompt) + masks, length):
        end = start + length
        given = tokens[start:end] != mask_id
        left = 0 if editing is None else post
        for step in itertools.count():
            rows = start + np.flatnonzero(tokens[start:end] == mask_id)
            if not len(rows) and not left:
                break
            seen = -(-end // block_length) * block_length
            logits = logits_of(tokens[:seen], block_length)[start:end].astype(np.float64)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            best, sure = logits.argmax(axis=1), (weights / weights.sum(axis=1, keepdims=True)).max(axis=1)
            before = tokens[start:end].copy()
            if len(rows):
                asked = Asked(quota=length // steps + (step < length % steps), threshold=threshold)
                order = sure[rows - start].tolist()
                taken = rows[committed(rule, order, order, [], asked)]
                tokens[taken] = best[taken - start]
            if editing is not None:
                changed = ~given & (before != mask_id) & (before != best) & (sure > editing)
                tokens[start:end][changed] = best[changed]
                if not len(rows):
                    left = left - 1 if changed.any() else 0
            states.append(tokens.copy())
    return states
