"""Which requests causal models take, and which models that denoise."""

import dataclasses
from typing import Any

import pytest

from jdllm.decoding.block_sampling import check_blocks
from jdllm.decoding.causal_sampling import check_causal, check_denoising
from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError

TAKEN: dict[str, Any] = {
    "gen_length": 64,
    "max_tokens": 48,
    "early_stop": False,
    "stop": ("x",),
    "stop_token_ids": (3,),
    "n": 2,
    "logprobs": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": None,
    "min_tokens": 2,
    "logit_bias": {7: -1.5},
    "allowed_token_ids": (3, 7, 9),
    "bad_words": ((3, 7),),
    "logits_eos_inf": True,
    "undefined_tokens": "banned",
    "return_history": True,
    "priority": -3,
}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("stop_in_block", {"stop_in_block": True}),
    ("small_block_length", {"small_block_length": 8}),
    ("editing_threshold", {"editing_threshold": 0.5, "max_post_steps": 4, "penalty_lambda": 1.0}),
    ("steps", {"steps": 8}),
    ("block_length", {"block_length": 32}),
    ("alg", {"alg": "entropy"}),
    ("alg", {"alg": "confidence_threshold", "alg_temp": 0.1}),
    ("alg", {"alg": "origin", "eps": 1e-3}),
    ("alg", {"alg": "topk_margin", "quota": "batch"}),
    ("transfer", {"transfer": "threshold", "threshold": 0.8, "threshold_strict": True}),
    ("transfer", {"transfer": "falling_threshold", "threshold_fall": 0.5}),
    ("transfer", {"transfer": "factor", "factor": 1.0, "factor_end": "fixed"}),
    ("transfer", {"transfer": "entropy_bound", "entropy_bound": 0.1}),
    ("transfer", {"transfer": "adaptive", "mixture_weight": 0.5, "max_lookahead": 8}),
    ("transfer", {"transfer": "lossy_speculation", "verify_policy": "span", "verify_span": 4}),
    ("transfer", {"transfer": "lossy_speculation", "verify_score": 1.0, "verify_cost": 0.0}),
    ("transfer", {"transfer": "lossy_speculation", "verify_on": 2.0, "verify_off": 0.0}),
    ("transfer", {"transfer": "lossy_speculation", "verify_cost_each": True, "verify_sharpness": 2.0}),
    ("transfer", {"transfer": "lossy_speculation", "commit_sure": True, "causal_rows": True}),
    ("remasking", {"remasking": "random"}),
    ("cache", {"cache": "sparse", "retention": 0.5, "pool_kernel": 3}),
    ("cache", {"cache": "dual", "refresh_delay": 0, "refresh_interval": 4, "official_forcing": True}),
    ("suffix_window", {"suffix_window": 32}),
    ("cfg_scale", {"cfg_scale": 1.0}),
    ("confidence_eos_eot_inf", {"confidence_eos_eot_inf": "fixed"}),
    ("confidence_dtype", {"confidence_dtype": "model"}),
    ("prompt_masks", {"prompt_masks": "official"}),
    ("prefilling", {"prefilling": Prefilling()}),
]


def test_every_field_is_taken_or_refused():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    refused = {name for _, options in REFUSED for name in options}
    apart = {"generation_mode", "structure"}  # a structure says where the text ends, in place of others
    assert fields == TAKEN.keys() | refused | apart
    assert not TAKEN.keys() & refused


def test_causal_models_take_what_applies():
    defaults = dataclasses.asdict(SamplingParams())
    assert all(defaults[name] != value for name, value in TAKEN.items())
    check_causal(SamplingParams())
    check_causal(SamplingParams(**TAKEN))


@pytest.mark.parametrize(("field", "options"), REFUSED)
def test_what_only_denoising_uses_is_refused(field: str, options: dict[str, Any]):
    sampling = SamplingParams(**options)
    with pytest.raises(RequestError, match=rf"^{field} is for models that denoise: a causal model [^\n]+$"):
        check_causal(sampling)
    of_blocks = field in ("stop_in_block", "small_block_length", "editing_threshold")
    of_blocks |= options.get("transfer") == "lossy_speculation"
    (check_blocks if of_blocks else check_denoising)(sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(frequency_penalty=0.1),
    ],
)
def test_models_that_denoise_have_no_penalty(sampling: SamplingParams):
    check_denoising(SamplingParams(repetition_penalty=1, presence_penalty=0, frequency_penalty=0))
    with pytest.raises(RequestError, match=r"^\w+_penalty is for causal models: [^\n]+$"):
        check_denoising(sampling)
