"""The official loops once more: slow, obvious, one sequence, NumPy float64.

It shares no code with the library. The model is a function from ids `[length]` to logits `[length, vocab]`;
the noise is the documented one, recomputed in `numpy_noise`; the rules are those of `slow_rules`.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jdllm.decoding.sampling import SamplingParams
from tests.decoding import numpy_noise, slow_rules
from tests.decoding.slow_rules import Asked, Rule

Logits = Callable[[np.ndarray], np.ndarray]

CONFIDENCE_RULES = {
    "threshold": Rule.THRESHOLD,
    "falling_threshold": Rule.FALLING_THRESHOLD,
    "factor": Rule.FACTOR,
    "entropy_bound": Rule.ENTROPY_BOUND,
}


class Ids(NamedTuple):
    """What the loop knows of the model: special ids, the first undefined id, and whether logits shift."""

    mask: int
    eos: int | None = None
    eot: int | None = None
    limit: int | None = None
    shift: bool = False


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
        for rule, asked in _steps(sampling, masks, steps, x[:stop], ids.mask):
            candidates = [at for at in range(stop) if x[at] == ids.mask]
            if not candidates:
                break
            logits = logits_of(x).astype(np.float64)
            if sampling.cfg_scale > 0:
                unguided = logits_of(np.where(given, ids.mask, x)).astype(np.float64)
                logits = unguided + (sampling.cfg_scale + 1) * (logits - unguided)
            if ids.shift:
                logits = np.concatenate([logits[:1], logits[:-1]])
            chosen = [choose(logits[at], at, len(states), sampling, ids) for at in candidates]
            confidence = [c for _, c in chosen]
            order, draws = _order(confidence, candidates, len(states), sampling)
            for i in slow_rules.committed(rule, confidence, order, draws, asked):
                x[candidates[i]] = chosen[i][0]
            states.append(x.copy())
    return states


def _steps(
    sampling: SamplingParams, masks: int, steps: int, tokens: np.ndarray, mask: int
) -> Iterator[tuple[Rule, Asked]]:
    """The rule and its parameters for each step of a block; `tokens` changes between them."""

    def left() -> int:
        return int((tokens == mask).sum())

    if sampling.alg == "confidence_threshold":
        put_off, i = 0, 0
        while True:
            quota = (masks // steps if i < steps else 0) + put_off
            before = left()
            yield (
                Rule.DEFERRED,
                Asked(
                    quota,
                    threshold=sampling.effective("threshold"),
                    strict=sampling.effective("threshold_strict"),
                ),
            )
            put_off, i = quota - (before - left()), i + 1
    if sampling.alg is not None:
        times = np.linspace(1, sampling.effective("eps"), steps + 1)
        for i in range(steps):
            share = 1 - times[i + 1] / times[i] if i < steps - 1 else 1.0
            rule = Rule.ORIGIN if sampling.alg == "origin" else Rule.QUOTA
            yield rule, Asked(int(left() * share), fraction=share)
    elif sampling.transfer in CONFIDENCE_RULES:
        while True:
            yield (
                CONFIDENCE_RULES[sampling.transfer],
                Asked(
                    threshold=sampling.effective("threshold"),
                    strict=sampling.effective("threshold_strict"),
                    factor=sampling.effective("factor"),
                    open_end=sampling.effective("factor_end") == "official",
                    entropy_bound=sampling.effective("entropy_bound"),
                    fall=sampling.effective("threshold_fall"),
                    masks=masks,
                ),
            )
    else:
        rule = Rule.DYNAMIC if sampling.transfer == "dynamic" else Rule.QUOTA
        for i in range(steps):
            quota = masks // steps + (1 if i < masks % steps else 0)
            yield rule, Asked(quota, threshold=sampling.effective("threshold"))


def _order(
    confidence: list[float], positions: list[int], step: int, sampling: SamplingParams
) -> tuple[list[float], list[float]]:
    """What ranks the candidates, and their own uniform draws."""
    bits = [
        numpy_noise.position_bits(seed_of(sampling), numpy_noise.SELECTION, step, position)
        for position in positions
    ]
    draws = [numpy_noise.uniform(b) for b in bits]
    if not sampling.alg_temp or sampling.alg == "origin":
        return confidence, draws
    noise = [float(numpy_noise.gumbel(b)) for b in bits]
    return [c / sampling.alg_temp + g for c, g in zip(confidence, noise, strict=True)], draws


def seed_of(sampling: SamplingParams) -> int:
    assert sampling.seed is not None
    return sampling.seed


def choose(
    logits: np.ndarray, position: int, step: int, sampling: SamplingParams, ids: Ids
) -> tuple[int, float]:
    """(token, confidence) of one masked position."""
    logits = logits.copy()
    if sampling.logits_eos_inf:
        logits[ids.eos] = -np.inf
    if sampling.bans_undefined:
        logits[ids.mask] = -np.inf
        logits[len(logits) if ids.limit is None else ids.limit :] = -np.inf
    choices = _filtered(logits, sampling)
    if sampling.alg is not None:
        logits = choices
    noised = choices
    if sampling.temperature > 0:
        bits = numpy_noise.token_bits(seed_of(sampling), step, position, len(logits))
        noised = choices + sampling.temperature * numpy_noise.gumbel(bits)
    token = int(noised.argmax())
    if sampling.remasking == "random":
        confidence = numpy_noise.order_uniform(seed_of(sampling), step, position)
    else:
        confidence = _confidence(logits, token, position, sampling, ids)
    if sampling.confidence_eos_eot_inf == "fixed" and token in (ids.eos, ids.eot):
        confidence = -1e30
    return token, confidence


def _filtered(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Of the tempered distribution the shortest head beyond top_p, of that the first top_k, and what is at
    least min_p times as likely as the likeliest."""
    falling = np.argsort(-logits, kind="stable")
    weights = _softmax(logits / (sampling.temperature or 1.0))[falling]
    kept = len(logits)
    if sampling.top_p is not None and sampling.top_p < 1:
        kept = 1
        while kept < len(logits) and weights[:kept].sum() <= sampling.top_p:
            kept += 1
    kept = min(kept, sampling.top_k or kept)
    kept = min(kept, int((weights >= (sampling.min_p or 0) * weights[0]).sum()))
    out = np.full_like(logits, -np.inf)
    out[falling[:kept]] = logits[falling[:kept]]
    return out


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _confidence(logits: np.ndarray, token: int, position: int, sampling: SamplingParams, ids: Ids) -> float:
    logits = logits.copy()
    if sampling.alg is not None and sampling.temperature > 0:
        logits /= sampling.temperature
    if sampling.confidence_eos_eot_inf == "official":
        logits[ids.eot] = -np.inf
        if sampling.temperature == 0:
            logits[ids.eos] = -np.inf
    p = _softmax(logits)
    measure = sampling.alg or sampling.transfer
    if measure in ("margin", "topk_margin"):
        second, best = np.sort(p)[-2:]
        confidence = best - second
    elif measure in ("entropy", "entropy_bound"):
        confidence = (p * np.log(p + 1e-10)).sum()
    elif measure == "sequential":
        return -float(position)
    else:
        confidence = p[token]
    if sampling.confidence_dtype == "model":
        return float(np.float32(confidence).astype(ml_dtypes.bfloat16))
    return float(confidence)
