"""The official LLaDA loop once more: slow, obvious, one sequence, NumPy float64.

It shares no code with the library. The model is a function from ids `[length]` to logits `[length, vocab]`;
the noise is the documented one, recomputed in `numpy_noise`.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jdllm.decoding.sampling import SamplingParams
from tests.decoding import numpy_noise

Logits = Callable[[np.ndarray], np.ndarray]


class Ids(NamedTuple):
    mask: int
    eos: int | None = None
    eot: int | None = None


def generate(logits_of: Logits, prompt: np.ndarray, sampling: SamplingParams, ids: Ids) -> list[np.ndarray]:
    """The sequence after every step that had something to fill."""
    length = sampling.gen_length
    block_length = sampling.block_length or length
    steps = (sampling.steps or length) // (length // block_length)
    x = np.concatenate([prompt, np.full(length, ids.mask)])
    starts = range(len(prompt), len(x), block_length)
    return _denoise(logits_of, x, [(at, at + block_length, steps) for at in starts], sampling, ids)


def infill(logits_of: Logits, sequence: np.ndarray, sampling: SamplingParams, ids: Ids) -> list[np.ndarray]:
    """Masks in order, `block_length` at a time, each group finished before the next."""
    masks = [at for at, token in enumerate(sequence) if token == ids.mask]
    size = sampling.block_length or len(masks)
    groups = [masks[at : at + size] for at in range(0, len(masks), size)]
    steps = [sampling.steps // len(groups) if sampling.steps else len(group) for group in groups]
    blocks = [(group[0], group[-1] + 1, count) for group, count in zip(groups, steps, strict=True)]
    return _denoise(logits_of, sequence.copy(), blocks, sampling, ids)


def _denoise(
    logits_of: Logits, x: np.ndarray, blocks: list[tuple[int, int, int]], sampling: SamplingParams, ids: Ids
) -> list[np.ndarray]:
    given = x != ids.mask
    states = []
    for start, stop, steps in blocks:
        masks = int((x[start:stop] == ids.mask).sum())
        for i in range(steps):
            candidates = [at for at in range(stop) if x[at] == ids.mask]
            if not candidates:
                break
            logits = logits_of(x).astype(np.float64)
            if sampling.cfg_scale > 0:
                unguided = logits_of(np.where(given, ids.mask, x)).astype(np.float64)
                logits = unguided + (sampling.cfg_scale + 1) * (logits - unguided)
            choice = {at: _choose(logits[at], at, len(states), sampling, ids) for at in candidates}
            quota = masks // steps + (1 if i < masks % steps else 0)
            for at in sorted(candidates, key=lambda at: (-choice[at][1], at))[:quota]:
                x[at] = choice[at][0]
            states.append(x.copy())
    return states


def _choose(
    logits: np.ndarray, position: int, step: int, sampling: SamplingParams, ids: Ids
) -> tuple[int, float]:
    """(token, confidence) of one masked position."""
    logits = logits.copy()
    if sampling.logits_eos_inf:
        logits[ids.eos] = -np.inf
    noised = logits
    if sampling.temperature > 0:
        bits = numpy_noise.token_bits(sampling.seed, step, position, len(logits))
        noised = logits + sampling.temperature * numpy_noise.gumbel(bits)
    token = int(noised.argmax())
    if sampling.remasking == "random":
        confidence = numpy_noise.order_uniform(sampling.seed, step, position)
    else:
        confidence = _probability(logits, token, sampling, ids)
    if sampling.confidence_eos_eot_inf == "fixed" and token in (ids.eos, ids.eot):
        confidence = -1.0
    return token, confidence


def _probability(logits: np.ndarray, token: int, sampling: SamplingParams, ids: Ids) -> float:
    if sampling.confidence_eos_eot_inf == "official":
        logits = logits.copy()
        logits[ids.eot] = -np.inf
        if sampling.temperature == 0:
            logits[ids.eos] = -np.inf
    weights = np.exp(logits - logits.max())
    probability = weights[token] / weights.sum()
    if sampling.confidence_dtype == "model":
        return float(np.float32(probability).astype(ml_dtypes.bfloat16))
    return float(probability)
