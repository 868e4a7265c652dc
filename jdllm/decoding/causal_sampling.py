"""Which sampling parameters a model has a use for: one that is causal, and one that denoises."""

from collections.abc import Iterable, Iterator
from typing import Any

from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.sampling_checks import ORDERS
from jdllm.errors import RequestError

_IN_ORDER = "commits each token as it comes"
_UNRANKED = "ranks no tokens by confidence"

_OF_DENOISING = {
    "stop_in_block": "has no blocks",
    "small_block_length": "has no blocks",
    "editing_threshold": "has no blocks",
    "steps": "generates one token after another",
    "block_length": "has no blocks",
    "alg": _IN_ORDER,
    "transfer": _IN_ORDER,
    "remasking": _IN_ORDER,
    "cache": "keeps the keys and values of every token",
    "suffix_window": "has no blocks",
    "cfg_scale": "has no classifier-free guidance",
    "confidence_eos_eot_inf": _UNRANKED,
    "confidence_dtype": _UNRANKED,
    "prompt_masks": "fills no masks",
    "prefilling": "takes its prompt whole",
}
"""Fields that only denoising uses, and why a causal model does not. Parameters of a rule or a cache are
refused with it: without it they cannot be set."""

_OF_BLOCKS = ("stop_in_block", "small_block_length", "editing_threshold")

_DEFAULTS = SamplingParams()

PENALTIES = {
    name: getattr(_DEFAULTS, name) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
}
"""Fields that only causal models use, each with the value that changes nothing."""


def changed(sampling: SamplingParams, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """The fields that are not at their default: the name, the value and the default of each."""
    for name in names:
        value, default = getattr(sampling, name), getattr(_DEFAULTS, name)
        if value != default:
            yield name, value, default


def penalties_of(sampling: SamplingParams) -> list[str]:
    """The penalties that change something."""
    return [name for name, *_ in changed(sampling, PENALTIES)]


def check_causal(sampling: SamplingParams) -> None:
    """Raise `RequestError` where a field that only denoising uses is not at its default."""
    check_one_way(sampling)
    for name, *_ in changed(sampling, _OF_DENOISING):
        raise RequestError(f"{name} is for models that denoise: a causal model {_OF_DENOISING[name]}")


def check_no_lossy_speculation(sampling: SamplingParams, why: str) -> None:
    """Raise `RequestError` for a request whose steps verify drafts, where there is none.

    Arguments:
    - `why`: what the request would need.
    """
    if sampling.lossy_speculation:
        raise RequestError(f"transfer 'lossy_speculation' {why}: choose another transfer")


def check_denoising(sampling: SamplingParams) -> None:
    """Raise `RequestError` where a field that only causal or block models use is not at its default."""
    check_one_way(sampling)
    check_unpenalised(sampling)
    check_frontier(sampling)
    why = "is for block models, which verify drafts in blocks of one row"
    check_no_lossy_speculation(sampling, why)
    for name, *_ in changed(sampling, _OF_BLOCKS):
        raise RequestError(f"{name} is for block models, whose rows see no later block: leave it out")


def check_one_way(sampling: SamplingParams) -> None:
    """Raise `RequestError` where a request chooses its way of generating, for models that have one way."""
    if sampling.generation_mode is not None:
        raise RequestError(
            "generation_mode is for models that generate in several ways (Nemotron-Labs-Diffusion), and this"
            f" model has one: leave generation_mode out (it is {sampling.generation_mode!r})"
        )


def check_unstructured(sampling: SamplingParams, why: str) -> None:
    """Raise `RequestError` where an answer is to have a form.

    Arguments:
    - `why`: what a form would need, and what there is.
    """
    if sampling.structure is not None:
        raise RequestError(f"structure {why}: leave it out")


def check_frontier(sampling: SamplingParams) -> None:
    """Raise `RequestError` where an answer is to have a form, and its tokens are not to be committed one by
    one from left to right."""
    if sampling.structure is None:
        return
    for name, value, default in changed(sampling, ORDERS):
        raise RequestError(
            f"structure commits one token after another, from the left: leave {name} at {default!r}"
            f" (it is {value!r})"
        )
    if sampling.steps not in (None, sampling.gen_length):
        raise RequestError(
            f"structure commits one token in each step: leave steps out (it is {sampling.steps}, for"
            f" {sampling.gen_length} tokens)"
        )


def check_unpenalised(sampling: SamplingParams) -> None:
    """Raise `RequestError` where a field that only causal models use is not at its default."""
    for name in penalties_of(sampling):
        raise RequestError(f"{name} is for causal models: one that denoises does not generate in order")
