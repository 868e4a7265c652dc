"""Which sampling parameters go together."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jdllm.decoding.kinds import POST_STEPS
from jdllm.decoding.registry import NO_CACHE, POLICIES, RULES, options
from jdllm.decoding.transfer.rule import Measure
from jdllm.errors import RequestError

if TYPE_CHECKING:
    from jdllm.decoding.sampling import SamplingParams

FILTERS = {"top_p": 1, "top_k": None, "min_p": 0}
"""The filters of a distribution, with the value that lets everything pass."""

_SCHEDULE = "schedule"
"""The rule that is no rule of its own: orders of Dream take its place."""

_NOT_ADAPTIVE = {
    "cfg_scale": (0.0, "has no classifier-free guidance"),
    "suffix_window": (None, "evaluates all masks behind a block"),
    "official_forcing": (None, "accepts as much of a block's first draft as of others"),
    "remasking": ("low_confidence", "goes from left to right"),
    "confidence_eos_eot_inf": (None, "goes from left to right"),
    "prompt_masks": ("error", "does not fill masks in the prompt (infill does)"),
    "min_tokens": (0, "chooses by the logits of two models"),
    "logit_bias": (None, "chooses by the logits of two models"),
    "allowed_token_ids": (None, "chooses by the logits of two models"),
    "bad_words": ((), "chooses by the logits of two models"),
}
"""What adaptive parallel decoding has not: each option's default, and why."""

_NOT_PREFILLED = {
    "cache": ("none", "is a cache of its own"),
    "suffix_window": (None, "has no steps of whole sequences"),
    "cfg_scale": (0.0, "has no classifier-free guidance"),
    "alg": (None, "commits by transfer rules"),
    "prompt_masks": ("error", "does not fill masks in the prompt"),
}
"""What requests over long contexts have not: each option's default, and why."""


_NOT_STRUCTURED = {
    "cfg_scale": (0.0, "a grammar bans tokens, and guidance mixes the logits of two sequences"),
    "prefilling": (None, "a grammar follows an answer from its first token"),
    "stop": ((), "the structure says where the text ends"),
    "stop_token_ids": ((), "the structure says where the text ends"),
    "early_stop": (True, "the structure says where the text ends"),
    "min_tokens": (0, "the structure says where the text ends"),
    "logits_eos_inf": (False, "the text has to end"),
    "allowed_token_ids": (None, "the structure says which tokens may follow"),
    "bad_words": ((), "the structure says which tokens may follow"),
}
"""What requests with a structure have not: each option's default, and why."""

ORDERS = ("transfer", "alg", "remasking", "confidence_eos_eot_inf", "prompt_masks")
"""What says which masks a step commits: with a structure it is the first one."""


def check_together(sampling: "SamplingParams") -> None:
    """Raise `RequestError` for parameters that have no effect together, or that exclude each other."""
    _check_effect(sampling)
    _check_prefilling(sampling)
    _check_cache(sampling)
    _check_adaptive(sampling)
    _check_order(sampling)
    _check_editing(sampling)
    _check_structure(sampling)


def without_effect(fields: Mapping[str, Any]) -> list[str]:
    """The parameters among `fields` that belong to a rule or a cache, are set, and that nothing uses."""
    declared = options()
    return [
        name
        for name, value in fields.items()
        if value is not None
        and name in declared
        and not any(fields[user] in values for user, values in declared[name].users.items())
    ]


def excluded(given: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The parameters that a rule or a structure among given ones has no room for.

    Arguments:
    - `before`: the values before.
    """
    names = []
    if given.get("transfer", _SCHEDULE) != _SCHEDULE:
        names.append("alg")
    if given.get("alg") is not None:
        names += ["transfer", "remasking"]
    if given.get("transfer") == "adaptive":
        names += [*_NOT_ADAPTIVE, *FILTERS]
        if _keeps_some(before["cache"]):
            names.append("cache")
    if given.get("structure") is not None:
        names += [*ORDERS, "steps"]
    if given.get("editing_threshold", POST_STEPS) is None:
        names += ["max_post_steps", "penalty_lambda"]
    return names


def is_drawn(fields: Mapping[str, Any]) -> bool:
    """Whether tokens are drawn from distributions that filters could narrow."""
    return fields["temperature"] != 0 or fields["alg"] is not None


def _check_effect(sampling: "SamplingParams") -> None:
    for name in without_effect(vars(sampling)):
        users = options()[name].users.items()
        needs = " or ".join(f"{user} {' or '.join(map(repr, values))}" for user, values in users)
        raise RequestError(f"{name} has no effect here: it needs {needs}")


def _check_cache(sampling: "SamplingParams") -> None:
    cache = sampling.cache
    if cache == NO_CACHE:
        return
    if sampling.cfg_scale > 0:
        raise RequestError(f"cache {cache!r} has no classifier-free guidance: set cfg_scale=0")
    if sampling.prompt_masks != "error":
        raise RequestError(f"cache {cache!r} does not fill masks in the prompt: use infill for them")
    if sampling.quota == "batch":
        raise RequestError(f"quota 'batch' counts over requests in step: cache {cache!r} has none such")


def _check_prefilling(sampling: "SamplingParams") -> None:
    if sampling.prefilling and sampling.adaptive:
        raise RequestError("prefilling has no verifier: choose another transfer than 'adaptive'")
    for name, (default, why) in _NOT_PREFILLED.items() if sampling.prefilling else ():
        value = getattr(sampling, name)
        if value != default:
            raise RequestError(f"prefilling {why}: leave {name} at {default!r} (it is {value!r})")


def _check_adaptive(sampling: "SamplingParams") -> None:
    for name, (default, why) in _NOT_ADAPTIVE.items() if sampling.adaptive else ():
        value = getattr(sampling, name)
        if value != default:
            raise RequestError(f"transfer 'adaptive' {why}: leave {name} at {default!r} (it is {value!r})")
    if sampling.adaptive and _keeps_some(sampling.cache):
        raise RequestError(
            "transfer 'adaptive' drafts from keys of all rows that a cache may store, of which"
            f" {sampling.cache!r} keeps the best only: choose another cache, such as 'dual'"
        )
    for name, value in sampling.filters.items() if sampling.adaptive else ():
        raise RequestError(
            "transfer 'adaptive' draws from whole distributions:"
            f" leave {name} at {FILTERS[name]!r} (it is {value!r})"
        )


def _keeps_some(cache: str) -> bool:
    """Whether refreshes of a cache keep only some of the rows that they may store."""
    return cache != NO_CACHE and POLICIES[cache].scored


def _check_order(sampling: "SamplingParams") -> None:
    alg, transfer = sampling.alg, sampling.transfer
    if alg is None:
        ordered = RULES["transfer", transfer].measure is not Measure.PROBABILITY
        if sampling.remasking == "random" and ordered:
            raise RequestError(f"transfer {transfer!r} brings its own order: leave remasking alone")
        return
    if transfer != _SCHEDULE or sampling.remasking != "low_confidence":
        raise RequestError(f"alg {alg!r} brings its own order: leave transfer and remasking alone")
    if sampling.cache == NO_CACHE and sampling.block_length not in (None, sampling.gen_length):
        raise RequestError(f"alg {alg!r} has blocks only with a cache: leave block_length alone")


def _check_editing(sampling: "SamplingParams") -> None:
    if sampling.editing_threshold is None:
        if sampling.max_post_steps != POST_STEPS:
            raise RequestError("max_post_steps has no effect here: it needs an editing_threshold")
        if sampling.penalty_lambda:
            raise RequestError("penalty_lambda is for blocks that are edited: it needs an editing_threshold")
    elif sampling.stop_in_block:
        raise RequestError("a token may change until its block is finished: leave stop_in_block out")


def _check_structure(sampling: "SamplingParams") -> None:
    for name, (default, why) in _NOT_STRUCTURED.items() if sampling.structure else ():
        value = getattr(sampling, name)
        if value != default:
            raise RequestError(
                f"structure does not go with {name}: {why}; leave {name} at {default!r} (it is {value!r})"
            )
