"""Which sampling parameters a block model has a use for."""

from collections.abc import Mapping
from typing import Any

from jdllm.arrays import padded
from jdllm.decoding.causal_sampling import (
    changed,
    check_causal,
    check_no_lossy_speculation,
    check_unpenalised,
    check_unstructured,
)
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import StepTable
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig

_UNUSED = {
    "alg": "commits by transfer rules",
    "cache": "stores finished blocks, which is exact",
    "suffix_window": "evaluates nothing behind a block",
    "cfg_scale": "has no classifier-free guidance",
    "prefilling": "stores its prompt block by block",
}
"""Fields that only models use whose rows see the whole sequence, and why a block model does not."""


_NOT_SPECULATING = {
    "temperature": "takes the likeliest tokens as its draft",
    "small_block_length": "drafts and verifies whole blocks",
    "editing_threshold": "corrects no token",
    "confidence_eos_eot_inf": "accepts tokens by their probability",
    "confidence_dtype": "accepts tokens by their probability",
    "min_tokens": "accepts tokens by the model's own probabilities",
    "logit_bias": "accepts tokens by the model's own probabilities",
    "allowed_token_ids": "accepts tokens by the model's own probabilities",
    "bad_words": "accepts tokens by the model's own probabilities",
}
"""What lossy speculation has not, and why."""


def check_blocks(sampling: SamplingParams) -> None:
    """Raise `RequestError` where a field that a block model has no use for is not at its default."""
    if sampling.generation_mode not in (None, "diffusion"):
        raise RequestError(
            f"generation_mode is {sampling.generation_mode!r}, expected 'diffusion', 'self_speculation' or"
            " 'auto': a block model fills blocks"
        )
    check_unpenalised(sampling)
    check_unstructured(sampling, "needs tokens that come from left to right, and a block model fills blocks")
    for name, value, default in changed(sampling, _UNUSED):
        raise RequestError(f"a block model {_UNUSED[name]}: leave {name} at {default!r} (it is {value!r})")
    if sampling.adaptive:
        raise RequestError("a block model has no verifier: choose another transfer than 'adaptive'")
    for name, value, default in changed(sampling, _NOT_SPECULATING) if sampling.lossy_speculation else ():
        raise RequestError(
            f"transfer 'lossy_speculation' {_NOT_SPECULATING[name]}: leave {name} at {default!r}"
            f" (it is {value!r})"
        )


def verifies_drafts(config: ModelConfig) -> bool:
    """Whether a model can verify its own drafts by `transfer` "lossy_speculation"."""
    return config.attention == "block_causal" and not (config.causal_context or config.logits_shift)


def check_drafting(sampling: SamplingParams) -> None:
    """Raise `RequestError` where a field that a model which verifies its own drafts has no use for is not at
    its default."""
    if sampling.adaptive:
        raise RequestError("a model verifies its own drafts: choose another transfer than 'adaptive'")
    check_no_lossy_speculation(sampling, "verifies drafts in another way than self-speculation")
    if sampling.temperature:
        raise RequestError(
            "self-speculation takes the likeliest tokens: leave temperature at 0.0"
            f" (it is {sampling.temperature!r}), or draw with generation_mode='autoregressive'"
        )
    check_unpenalised(sampling)
    check_unstructured(sampling, "needs each token before the next one, and this request verifies drafts")
    check_causal(sampling.changed(block_length=None, transfer="schedule"))


def ways_of(sampling: SamplingParams, one_by_one: Mapping[str, Any]) -> dict[str, SamplingParams]:
    """The parameters of each way that a request leaves open whose `generation_mode` is "auto", by its name.

    Drafts fill all masks at once. Where the request has a `transfer` of its own, it accepts blocks that this
    rule fills, too.

    Arguments:
    - `one_by_one`: what the model changes in a request for one token after another.

    Raises `RequestError` where a field that a model which verifies its own drafts has no use for is not at
    its default.
    """
    own = sampling.changed(generation_mode=None)
    check_drafting(own)
    drafting = own.changed(transfer="schedule")
    ways = {
        "autoregressive": drafting.changed(**one_by_one),
        "self_speculation": drafting.changed(generation_mode="self_speculation"),
    }
    return ways if own.transfer == "schedule" else ways | {"diffusion": own}


def check_editing(sampling: SamplingParams, config: ModelConfig) -> None:
    """Raise `RequestError` where committed tokens are to be edited, and the model's logits are shifted."""
    if sampling.editing_threshold is not None and config.logits_shift:
        raise RequestError(
            "editing_threshold is for models whose rows predict their own token; the rows of this one predict"
            " the token behind them: leave it out"
        )


def post_steps(sampling: SamplingParams) -> int:
    """How many steps a block may take after it is filled."""
    return 0 if sampling.editing_threshold is None else sampling.max_post_steps


def with_post_steps(table: StepTable, sampling: SamplingParams) -> StepTable:
    """The table of a block, and where a request edits, the steps that the block may take after it is filled.

    Arguments:
    - `table`: of the steps that fill the block.
    """
    length = len(table) + post_steps(sampling)
    return StepTable(*(padded(column, length) for column in table))
