"""Diffusion behind a causal context once more: one sequence, no cache, one evaluation of all of it a step."""

from collections.abc import Callable

import numpy as np

from tests.blocks.lossy_oracle import SeenLogits
from tests.decoding.slow_rules import Asked, Rule, committed

Logits = Callable[[np.ndarray, int], np.ndarray]
"""(ids, how many of the first rows are causal; the others see all) -> logits of each row."""


def both_ways(seen: SeenLogits, prompt: int, length: int) -> Logits:
    """Logits where rows of the prompt see each other, and those of each block all up to its end.

    Arguments:
    - `seen`: of the model; `prompt`, `length`: how many tokens the prompt and a block have.
    """

    def of(tokens: np.ndarray, causal: int) -> np.ndarray:
        row = np.arange(len(tokens))
        ends = np.where(row < prompt, prompt, prompt + ((row - prompt) // length + 1) * length)
        return seen(tokens, ends)

    return of


def generate(
    logits_of: Logits,
    prompt: np.ndarray,
    blocks: int,
    length: int,
    mask_id: int,
    threshold: float | None,
    *,
    foretold: bool = True,
) -> list[np.ndarray]:
    """The sequence after each step, the first token of a block being one where it is `foretold`.

    Arguments:
    - `prompt`: int32 ids.
    - `blocks`, `length`: how many blocks, and the positions of each.
    - `threshold`: that tokens reach; `None` for one token a step.
    """
    tokens, states = np.append(prompt, np.full(blocks * length, mask_id)), []
    for start in range(len(prompt), len(tokens), length):
        stop = start + length
        if foretold:
            tokens[start] = logits_of(tokens[:start], start)[-1].argmax()
            states.append(tokens.copy())
        while (tokens[start:stop] == mask_id).any():
            rows = start + np.flatnonzero(tokens[start:stop] == mask_id)
            logits = logits_of(tokens[:stop], start)[rows].astype(np.float64)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            sure = (weights / weights.sum(axis=1, keepdims=True)).max(axis=1).tolist()
            rule = Rule.QUOTA if threshold is None else Rule.THRESHOLD
            taken = committed(rule, sure, sure, [], Asked(quota=1, threshold=threshold or 0))
            tokens[rows[taken]] = logits.argmax(axis=1)[taken]
            states.append(tokens.copy())
    return states
