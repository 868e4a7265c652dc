"""How many tokens each denoising step may commit."""

from typing import NamedTuple

import numpy as np

from jdllm.errors import RequestError


class StepTable(NamedTuple):
    """What a block's steps may commit; which of the two counts depends on the rule.

    - `quota`: int32 `[steps]`, tokens of each step.
    - `fraction`: f32 `[steps]`, share of the rows still masked.
    """

    quota: np.ndarray
    fraction: np.ndarray

    def __len__(self) -> int:
        return len(self.quota)


def quotas(quota: np.ndarray) -> StepTable:
    """The table of a rule that commits `quota`, int32 `[steps]`."""
    return StepTable(quota, np.zeros(len(quota), np.float32))


def fractions(fraction: np.ndarray) -> StepTable:
    """The table of a rule that commits `fraction`, f32 `[steps]`."""
    return StepTable(np.zeros(len(fraction), np.int32), fraction)


def transfer_schedule(masks: int, steps: int) -> np.ndarray:
    """LLaDA's linear schedule: `masks` tokens spread over `steps` steps, larger counts first.

    Arguments:
    - `masks`: masked positions of the block when it is entered.
    - `steps`: denoising steps of the block, at least 1.

    Returns int32 `[steps]` that sums to `masks`. Source: get_num_transfer_tokens of ML-GSAI/LLaDA.
    """
    base, extra = divmod(masks, steps)
    return np.full(steps, base, np.int32) + (np.arange(steps) < extra)


def dream_fractions(steps: int, eps: float) -> np.ndarray:
    """Dream's timetable: the share of the masked rows that each step commits.

    Times fall evenly from 1 to `eps`; a step from t to s commits 1 - s / t, the last one everything. The
    f32 rounding equals the published code (evenly spaced values are built from both ends), because the
    counts are truncated to integers.

    Returns f32 `[steps]`. Source: HKUNLP/Dream, generation_utils.
    """
    start, end = np.float32(1), np.float32(eps)
    stride = (end - start) / np.float32(steps)
    index = np.arange(steps + 1)
    rising = start + stride * index.astype(np.float32)
    falling = end - stride * (steps - index).astype(np.float32)
    times = np.where(index < (steps + 1) // 2, rising, falling).astype(np.float32)
    fractions = 1 - times[1:] / times[:-1]
    fractions[-1] = 1
    return fractions.astype(np.float32)


def deferred_quota(masks: int, steps: int) -> np.ndarray:
    """Fast-dLLM's quota for Dream, relative to the rows still masked.

    The rule commits masks / steps tokens a step and carries over what it puts off, for as many steps as it
    takes. Over i + 1 steps it may thus have committed base * min(i + 1, steps) tokens, so its quota is that,
    less `masks`, plus the rows that are still masked; this returns the part that does not depend on them.

    Returns int32 `[steps + masks]`, enough for the slowest case. Raises `RequestError` where the steps do
    not divide the masks.
    """
    if masks % steps:
        raise RequestError(
            f"alg 'confidence_threshold' commits gen_length / steps tokens a step: {masks} is not divisible"
            f" by {steps}"
        )
    index = np.arange(steps + masks)
    return (masks // steps * np.minimum(index + 1, steps) - masks).astype(np.int32)


def block_steps(gen_length: int, steps: int, block_length: int) -> int:
    """Denoising steps of each block, or `RequestError` where the lengths do not divide."""
    if gen_length % block_length:
        raise RequestError(
            f"gen_length {gen_length} is not divisible by block_length {block_length}:"
            f" choose a block_length that divides it, such as {_divisor(gen_length, block_length)}"
        )
    blocks = gen_length // block_length
    if steps % blocks:
        near = max(round(steps / blocks), 1) * blocks
        raise RequestError(
            f"steps {steps} is not divisible by the number of blocks {blocks}"
            f" (gen_length {gen_length} / block_length {block_length}): choose a multiple, such as {near}"
        )
    return steps // blocks


def _divisor(length: int, at_most: int) -> int:
    return next(d for d in range(min(at_most, length), 0, -1) if length % d == 0)
