"""Block diffusion once more: slow, one sequence, no cache, NumPy float64."""

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
) -> list[np.ndarray]:
    """The sequence after each step.

    Arguments:
    - `prompt`: int32 ids.
    - `masks`: how many tokens to generate; the sequence ends with the block of the last of them.
    - `steps`: of a block, by default one for each of its positions.
    """
    stop = -(-(len(prompt) + masks) // block_length) * block_length
    tokens = np.concatenate([prompt, np.full(stop - len(prompt), mask_id)])
    steps, states = steps or block_length, []
    for start in range(len(prompt) // block_length * block_length, stop, block_length):
        end = start + block_length
        for step in range(steps):
            rows = start + np.flatnonzero(tokens[start:end] == mask_id)
            if not len(rows):
                break
            logits = logits_of(tokens[:end], block_length)[rows].astype(np.float64)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            best, sure = logits.argmax(axis=1), (weights / weights.sum(axis=1, keepdims=True)).max(axis=1)
            quota = block_length // steps + (step < block_length % steps)
            asked = Asked(quota=quota, threshold=threshold)
            taken = committed(rule, sure.tolist(), sure.tolist(), [], asked)
            tokens[rows[taken]] = best[taken]
            states.append(tokens.copy())
    return states
