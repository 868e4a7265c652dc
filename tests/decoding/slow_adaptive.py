"""Adaptive parallel decoding once more: slow, obvious, one sequence, NumPy float64.

It shares no code with the library; the models are functions from ids `[length]` to logits `[length, vocab]`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from tests.decoding import numpy_noise

Logits = Callable[[np.ndarray], np.ndarray]


class Models(NamedTuple):
    """Both models, the mask id, whether the diffusion model's logits shift, and ids that end a text."""

    diffusion: Logits
    verifier: Logits
    mask: int
    shift: bool
    stops: tuple[int, ...] = ()


class Iteration(NamedTuple):
    """The positions and tokens of a draft, how many were accepted, and the sequence afterwards."""

    window: list[int]
    draft: list[int]
    accepted: int
    sequence: np.ndarray


def decode(models: Models, sequence: np.ndarray, sampling: SamplingParams) -> list[Iteration]:
    """Fill the masks of `sequence`; a text that starts at its first mask ends at a stop id.

    Blocks are cut from its first mask on, and a window ends with its block.
    """
    x = sequence.copy()
    start = int(np.flatnonzero(x == models.mask)[0])
    length = sampling.block_length or len(x)
    done: list[Iteration] = []
    while models.mask in x:
        masks = [at for at, token in enumerate(x) if token == models.mask]
        block = (masks[0] - start) // length
        window = [at for at in masks if (at - start) // length == block][
            : sampling.effective("max_lookahead")
        ]
        d = models.diffusion(x).astype(np.float64)
        if models.shift:
            d = np.concatenate([d[:1], d[:-1]])
        draft = [_draw(d[at], at, len(done), sampling, models.mask) for at in window]
        y = x.copy()
        y[window] = draft
        accepted = 1
        if len(window) > 1:
            v = models.verifier(y[: window[-1]]).astype(np.float64)
            while accepted < len(window):
                at = window[accepted]
                common = min(d.shape[1], v.shape[1])
                share = sampling.effective("mixture_weight")
                mixture = share * d[at, :common] + (1 - share) * v[at - 1, :common]
                if _draw(mixture, at, len(done), sampling, models.mask) != draft[accepted]:
                    break
                accepted += 1
        x[window[:accepted]] = draft[:accepted]
        done.append(Iteration(window, draft, accepted, x.copy()))
        if sampling.early_stop and np.isin(x[start:], models.stops).any():
            break
    return done


def _draw(logits: np.ndarray, position: int, step: int, sampling: SamplingParams, mask: int) -> int:
    logits = logits.copy()
    if mask < len(logits):
        logits[mask] = -np.inf
    if sampling.temperature > 0:
        assert sampling.seed is not None
        noise = numpy_noise.gumbel(numpy_noise.token_bits(sampling.seed, step, position, len(logits)))
        logits = logits / sampling.temperature + noise
    return int(logits.argmax())
