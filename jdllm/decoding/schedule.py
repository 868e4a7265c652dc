"""How many tokens each denoising step commits."""

import numpy as np

from jdllm.errors import RequestError


def transfer_schedule(masks: int, steps: int) -> np.ndarray:
    """LLaDA's linear schedule: `masks` tokens spread over `steps` steps, larger counts first.

    Arguments:
    - `masks`: masked positions of the block when it is entered.
    - `steps`: denoising steps of the block, at least 1.

    Returns int32 `[steps]` that sums to `masks`. Source: get_num_transfer_tokens of ML-GSAI/LLaDA.
    """
    base, extra = divmod(masks, steps)
    return np.full(steps, base, np.int32) + (np.arange(steps) < extra)


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
