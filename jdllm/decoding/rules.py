"""From `SamplingParams` to the arrays that the step takes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jdllm.decoding.batch import BANS, PADDING_BANS
from jdllm.decoding.controls import control_columns, control_of
from jdllm.decoding.registry import NO_CACHE, RULES, number_of, numbered, options
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import StepTable, quotas
from jdllm.decoding.transfer.of_rules import OfRules
from jdllm.decoding.transfer.quota import QUOTA
from jdllm.decoding.transfer.rule import Acceptance, Measure, TransferRule
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.noise import seed_words
from jdllm.pallas.masked_logits import Level

_COLDEST = 1e-20
"""Logits divided by less might be infinite; what is drawn at this temperature is the likeliest already."""

_TREES = ("options", "control")
"""Entries of `segment_row` that are more than a number or a row of numbers."""

_ENTRIES = {float: np.float32, int: np.int32, bool: np.bool_}


def rule_of(sampling: SamplingParams) -> TransferRule:
    """The transfer rule of a request; the rule of adaptive parallel decoding has no acceptance."""
    rule = RULES["transfer", sampling.transfer] if sampling.alg is None else RULES["alg", sampling.alg]
    return rule if rule.cached is None or sampling.cache == NO_CACHE else rule.cached


def measure_of(sampling: SamplingParams) -> Measure:
    """What orders the rows of a request."""
    return Measure.RANDOM if sampling.remasking == "random" else rule_of(sampling).measure


def acceptance_of(sampling: SamplingParams) -> Acceptance:
    """The part of a request's rule that runs on the device."""
    acceptance = rule_of(sampling).acceptance
    assert acceptance is not None  # adaptive parallel decoding has steps of its own
    return acceptance


def head_level(sampling: SamplingParams) -> Level:
    """How much of each row's distribution a request needs.

    A rule that takes long runs under a condition of the device, for which the host waits. Only the programs
    of the highest level have such conditions.
    """
    acceptance = rule_of(sampling).acceptance
    if evaluated_apart(sampling) or (acceptance is not None and acceptance.takes_long):
        return Level.FILTERED
    return Level.MOMENTS if measure_of(sampling) in (Measure.MARGIN, Measure.ENTROPY) else Level.TOP


def evaluated_apart(sampling: SamplingParams) -> bool:
    """Whether the logits of a request's rows have to exist: it filters or changes them, or lists the
    likeliest."""
    return sampling.filtered or sampling.listed > 0 or sampling.penalty_lambda > 0 or sampling.controlled


def step_table(sampling: SamplingParams, masks: int, steps: int, most: int) -> StepTable:
    """What the steps of a block may commit.

    Arguments:
    - `masks`: masked positions of the block; `steps`: its share of the request's steps.
    - `most`: masked positions that may be left when the block is entered. Rules without a quota commit at
      least one of them a step, so they never need more steps. Each of their steps may commit all `masks`.
    """
    rule = rule_of(sampling)
    if rule.table is not None:
        return rule.table(masks, steps, sampling.options)
    return quotas(np.full(most, masks, np.int32))


def segment_row(sampling: SamplingParams, config: ModelConfig, *, in_order: bool = False) -> dict[str, Any]:
    """The entries of `SegmentParams` that do not change while a request runs.

    Arguments:
    - `in_order`: whether each token is generated from all tokens before it.
    """
    token_bans, confidence_bans = bans(sampling, config)
    rule, filters, limit = rule_of(sampling), sampling.filters, _limit(sampling, config)
    number = number_of(QUOTA if rule.acceptance is None else rule.acceptance)
    return {
        "seed": seed_words(sampling.seed),
        "temperature": _temperature(sampling.temperature),
        "guidance": np.float32(sampling.cfg_scale),
        "tempered": np.bool_(sampling.alg is not None),
        "top_k": np.int32(min(filters.get("top_k", config.vocab_size), config.vocab_size)),
        "top_p": np.float32(filters.get("top_p", 2)),
        "min_p": np.float32(filters.get("min_p", 0)),
        "top_k_first": np.bool_(config.in_order),
        "limit": limit,
        "token_bans": token_bans,
        "control": control_of(sampling, config, int(limit), token_bans.tolist(), in_order=in_order),
        "confidence_bans": confidence_bans,
        "listed": np.bool_(sampling.listed > 0),
        "measure": np.int32(measure_of(sampling)),
        "coarse_confidence": np.bool_(sampling.confidence_dtype == "model"),
        "stop_last": np.bool_(sampling.confidence_eos_eot_inf == "fixed"),
        "order_temperature": _temperature(sampling.effective("alg_temp")),
        "rule": np.int32(number),
        "plus_masked": np.bool_(rule.quota == "plus masked"),
        "by_fraction": np.bool_(rule.quota == "share of masked"),
        "pooled": np.bool_(sampling.quota == "batch"),
        "options": {
            name: _entry(option.array, sampling.effective(name))
            for name, (option, _) in options().items()
            if option.array is not None
        },
    }


def initial_states(head_rows: int, segments: int) -> dict[str, dict[str, np.ndarray]]:
    """`Batch.states` of batches of these sizes in which every segment enters a block; only rules that carry
    something have an entry."""
    return {
        rule.name: {
            array.name: np.full(head_rows if array.per_row else segments, array.initial, array.dtype)
            for array in rule.state
        }
        for _, rule in numbered()
        if rule.state
    }


def segment_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of `SegmentParams` that `segment_row` gives, from the rows of all segments; positions of
    controls count from the beginning of a request's text."""
    columns: dict[str, Any] = {
        name: np.array([row[name] for row in rows]) for name in rows[0] if name not in _TREES
    }
    values = {}
    for name, (option, _) in options().items():
        if option.array is not None:
            given = [row["options"].get(name) for row in rows]
            # An option may have been registered after a request was made.
            default = _entry(option.array, option.default) if None in given else None
            values[name] = np.array([default if value is None else value for value in given])
    control = control_columns([row["control"] for row in rows])
    return {**columns, "options": OfRules(values, numbered()), "control": control}


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


def _entry(array: Callable[[Any], Any], value: Any) -> np.generic:
    """What stands for the value of an option in an array."""
    made = array(value)
    return made if isinstance(made, np.generic) else _ENTRIES[type(made)](made)


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
