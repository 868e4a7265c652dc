"""From `SamplingParams` to the arrays that the step takes."""

import numpy as np

from jdllm.decoding.batch import BANS, PADDING_BANS
from jdllm.decoding.sampling import BY_TIMETABLE, SamplingParams
from jdllm.decoding.schedule import StepTable, deferred_quota, dream_fractions, transfer_schedule
from jdllm.decoding.transfer import Measure, Rule
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.noise import seed_words
from jdllm.pallas.masked_logits import Level

_RULES = {
    "schedule": Rule.QUOTA,
    "margin": Rule.QUOTA,
    "threshold": Rule.THRESHOLD,
    "factor": Rule.FACTOR,
    "entropy_bound": Rule.ENTROPY_BOUND,
    "origin": Rule.ORIGIN,
    "maskgit_plus": Rule.QUOTA,
    "topk_margin": Rule.QUOTA,
    "entropy": Rule.QUOTA,
    "confidence_threshold": Rule.DEFERRED,
}
_MEASURES = {
    "margin": Measure.MARGIN,
    "topk_margin": Measure.MARGIN,
    "entropy_bound": Measure.ENTROPY,
    "entropy": Measure.ENTROPY,
}


_COLDEST = 1e-20
"""Logits divided by less might be infinite; what is drawn at this temperature is the likeliest already."""


def rule_of(sampling: SamplingParams) -> Rule:
    """The transfer rule of a request; adaptive parallel decoding has none.

    In blocks, which Dream's sampler has with a cache only, Fast-dLLM's rule puts nothing off.
    """
    if sampling.alg == "confidence_threshold" and sampling.cache != "none":
        return Rule.THRESHOLD
    return _RULES[sampling.alg or sampling.transfer]


def measure_of(sampling: SamplingParams) -> Measure:
    """What orders the rows of a request."""
    if sampling.remasking == "random":
        return Measure.RANDOM
    return _MEASURES.get(sampling.alg or sampling.transfer, Measure.PROBABILITY)


def head_level(sampling: SamplingParams) -> Level:
    """How much of each row's distribution a request needs."""
    if evaluated_apart(sampling):
        return Level.FILTERED
    return Level.MOMENTS if measure_of(sampling) in (Measure.MARGIN, Measure.ENTROPY) else Level.TOP


def evaluated_apart(sampling: SamplingParams) -> bool:
    """Whether the logits of a request's rows have to exist: it filters them, or lists the likeliest."""
    return sampling.filtered or sampling.listed > 0


def step_table(sampling: SamplingParams, masks: int, steps: int, most: int) -> StepTable:
    """What the steps of a block may commit.

    Arguments:
    - `masks`: masked positions of the block; `steps`: its share of the request's steps.
    - `most`: masked positions that may be left when the block is entered. Rules without a quota commit at
      least one of them a step, so they never need more steps.
    """
    rule = None if sampling.adaptive else rule_of(sampling)
    if rule is Rule.DEFERRED:
        quota = deferred_quota(masks, steps)
    elif rule is Rule.QUOTA and sampling.alg is None:
        quota = transfer_schedule(masks, steps)
    else:
        quota = np.zeros(steps if sampling.alg in BY_TIMETABLE else most, np.int32)
    fraction = np.zeros(len(quota), np.float32)
    if sampling.alg in BY_TIMETABLE:
        fraction = dream_fractions(steps, sampling.effective("eps"))
    return StepTable(quota, fraction)


def segment_row(sampling: SamplingParams, config: ModelConfig) -> dict[str, np.ndarray | np.generic]:
    """The entries of `SegmentParams` that do not change while a request runs."""
    token_bans, confidence_bans = bans(sampling, config)
    rule, filters = rule_of(sampling), sampling.filters
    return {
        "seed": seed_words(sampling.seed),
        "temperature": _temperature(sampling.temperature),
        "guidance": np.float32(sampling.cfg_scale),
        "tempered": np.bool_(sampling.alg is not None),
        "top_k": np.int32(min(filters.get("top_k", config.vocab_size), config.vocab_size)),
        "top_p": np.float32(filters.get("top_p", 2)),
        "min_p": np.float32(filters.get("min_p", 0)),
        "top_k_first": np.bool_(config.in_order),
        "limit": _limit(sampling, config),
        "token_bans": token_bans,
        "confidence_bans": confidence_bans,
        "listed": np.bool_(sampling.listed > 0),
        "measure": np.int32(measure_of(sampling)),
        "coarse_confidence": np.bool_(sampling.confidence_dtype == "model"),
        "stop_last": np.bool_(sampling.confidence_eos_eot_inf == "fixed"),
        "order_temperature": _temperature(sampling.effective("alg_temp")),
        "rule": np.int32(rule),
        "plus_masked": np.bool_(rule is Rule.DEFERRED),
        "by_fraction": np.bool_(sampling.alg in BY_TIMETABLE),
        "pooled": np.bool_(sampling.quota == "batch"),
        "threshold": np.float32(sampling.effective("threshold")),
        "strict": np.bool_(sampling.effective("threshold_strict")),
        "factor": np.float32(sampling.effective("factor")),
        "open_end": np.bool_(sampling.effective("factor_end") == "official"),
        "entropy_bound": np.float32(sampling.effective("entropy_bound")),
    }


def adaptive_row(sampling: SamplingParams, config: ModelConfig) -> dict[str, np.ndarray | np.generic]:
    """The entries of `AdaptiveSegments` that do not change while a request runs."""
    return {
        "seed": seed_words(sampling.seed),
        "temperature": np.float32(sampling.temperature),
        "limit": _limit(sampling, config),
        "token_bans": bans(sampling, config)[0],
        "listed": np.bool_(sampling.listed > 0),
        "mixture_weight": np.float32(sampling.effective("mixture_weight")),
    }


def bans(sampling: SamplingParams, config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """(ids never chosen, ids kept out of the confidence), int32 `[BANS]` each.

    Raises `RequestError` where an option needs an id that the checkpoint does not name.
    """
    tokens: list[int] = []
    confidence: list[int] = []
    if sampling.bans_undefined and config.mask_id is not None:
        tokens.append(config.mask_id)
    if sampling.logits_eos_inf:
        tokens.append(_known(config.eos_id, "logits_eos_inf", "end-of-sequence", "eos_token_id"))
    mode = sampling.confidence_eos_eot_inf
    if mode is not None:
        confidence.append(_known(config.eot_id, "confidence_eos_eot_inf", "end-of-turn", "eot_token_id"))
        if mode == "fixed" or sampling.temperature == 0:
            confidence.append(
                _known(config.eos_id, "confidence_eos_eot_inf", "end-of-sequence", "eos_token_id")
            )
    pad = [PADDING_BANS] * BANS
    return np.array((tokens + pad)[:BANS], np.int32), np.array((confidence + pad)[:BANS], np.int32)


def _temperature(asked: float) -> np.float32:
    """0, or a number that may divide any logit."""
    return np.float32(max(asked, _COLDEST) if asked else 0)


def _known(value: int | None, option: str, what: str, key: str) -> int:
    if value is None:
        raise RequestError(f"{option} needs the {what} id, which the checkpoint does not name ({key})")
    return value


def _limit(sampling: SamplingParams, config: ModelConfig) -> np.int32:
    """Ids from here on are never chosen."""
    return np.int32(config.defined_ids if sampling.bans_undefined else config.vocab_size)
