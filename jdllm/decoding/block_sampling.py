"""Which sampling parameters a block model has a use for."""

from jdllm.decoding.causal_sampling import changed, check_causal, check_one_way, check_unpenalised
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError

_UNUSED = {
    "alg": "commits by transfer rules",
    "cache": "stores finished blocks, which is exact",
    "suffix_window": "evaluates nothing behind a block",
    "cfg_scale": "has no classifier-free guidance",
    "prefilling": "stores its prompt block by block",
}
"""Fields that only models use whose rows see the whole sequence, and why a block model does not."""


def check_blocks(sampling: SamplingParams) -> None:
    """Raise `RequestError` where a field that a block model has no use for is not at its default."""
    check_one_way(sampling)
    check_unpenalised(sampling)
    for name, value, default in changed(sampling, _UNUSED):
        raise RequestError(f"a block model {_UNUSED[name]}: leave {name} at {default!r} (it is {value!r})")
    if sampling.adaptive:
        raise RequestError("a block model has no verifier: choose another transfer than 'adaptive'")


def check_drafting(sampling: SamplingParams) -> None:
    """Raise `RequestError` where a field that a model which verifies its own drafts has no use for is not at
    its default."""
    if sampling.adaptive:
        raise RequestError("a model verifies its own drafts: choose another transfer than 'adaptive'")
    if sampling.temperature:
        raise RequestError(
            "self-speculation takes the likeliest tokens: leave temperature at 0.0"
            f" (it is {sampling.temperature!r}), or draw with generation_mode='autoregressive'"
        )
    check_unpenalised(sampling)
    check_causal(sampling.changed(block_length=None, transfer="schedule"))
