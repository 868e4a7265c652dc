"""What a request may ask for."""

from typing import Any

import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import JdllmError, RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gen_length", 0),
        ("gen_length", 1.5),
        ("gen_length", None),
        ("gen_length", True),
        ("steps", 0),
        ("steps", -4),
        ("block_length", 0),
        ("block_length", "8"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("cfg_scale", -1.0),
        ("cfg_scale", float("inf")),
        ("remasking", "entropy"),
        ("confidence_eos_eot_inf", "yes"),
        ("confidence_eos_eot_inf", True),
        ("prompt_masks", "fill"),
        ("confidence_dtype", "bfloat16"),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("temperature", 1.1e6),
        ("cfg_scale", 1e7),
        ("temperature", True),
        ("transfer", "fastest"),
        ("transfer", None),
        ("transfer", "maskgit_plus"),
        ("alg", "threshold"),
        ("alg", ""),
        ("threshold", -0.1),
        ("threshold", float("nan")),
        ("factor", -1),
        ("factor", 2e6),
        ("factor_end", "open"),
        ("entropy_bound", -0.5),
        ("entropy_bound", float("inf")),
        ("alg_temp", -1.0),
        ("alg_temp", 1.1e6),
        ("eps", -0.001),
        ("eps", 1.5),
        ("eps", None),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_p", "0.5"),
        ("top_k", 0),
        ("top_k", 2.0),
        ("top_k", True),
        ("quota", "mean"),
        ("undefined_tokens", "forbidden"),
        ("undefined_tokens", False),
    ],
)
def test_a_bad_value_is_named_with_its_field(field: str, value: object):
    with pytest.raises(RequestError, match=f"^{field} is .*expected"):
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("option", [{"alg_temp": 0.5}, {"top_p": 0.9}, {"top_k": 5}, {"quota": "batch"}])
def test_options_of_dream_need_its_algorithm(option: dict[str, Any]):
    with pytest.raises(RequestError, match=rf"^{next(iter(option))} belongs to Dream's sampler: set alg"):
        SamplingParams(**option)
    assert SamplingParams(alg="entropy", **option).alg == "entropy"


@pytest.mark.parametrize(
    "option", [{"transfer": "threshold"}, {"transfer": "margin"}, {"remasking": "random"}]
)
def test_an_algorithm_of_dream_brings_its_own_order(option: dict[str, Any]):
    with pytest.raises(
        RequestError, match="alg 'maskgit_plus' brings its own order: leave transfer and remasking"
    ):
        SamplingParams(alg="maskgit_plus", **option)


def test_dream_has_no_blocks():
    with pytest.raises(RequestError, match="alg 'origin' has blocks only with a cache: leave block_length"):
        SamplingParams(alg="origin", gen_length=32, block_length=16)
    assert SamplingParams(alg="origin", gen_length=32, block_length=32).block_length == 32


@pytest.mark.parametrize("transfer", ["margin", "entropy_bound"])
def test_rules_with_an_order_of_their_own_take_no_random_one(transfer: Any):
    with pytest.raises(
        RequestError, match=f"transfer '{transfer}' brings its own order: leave remasking alone"
    ):
        SamplingParams(transfer=transfer, remasking="random")


@pytest.mark.parametrize(
    ("options", "banned"),
    [
        ({}, False),
        ({"alg": "entropy"}, False),
        ({"alg": "confidence_threshold"}, False),
        ({"transfer": "threshold"}, True),
        ({"transfer": "factor"}, True),
        ({"transfer": "entropy_bound"}, True),
        ({"transfer": "margin"}, True),
        ({"undefined_tokens": "banned"}, True),
        ({"undefined_tokens": "banned", "alg": "origin"}, True),
        ({"undefined_tokens": "official", "transfer": "threshold"}, False),
    ],
)
def test_published_samplers_alone_choose_undefined_ids(options: dict[str, Any], banned: bool):
    assert SamplingParams(**options).bans_undefined is banned


def test_every_request_error_is_a_jdllm_error():
    assert issubclass(RequestError, JdllmError)


def test_integers_are_numbers_too():
    assert SamplingParams(temperature=1, cfg_scale=2, seed=2**64 - 1).temperature == 1
    assert SamplingParams(alg="entropy", top_p=1, eps=0, alg_temp=10**6).top_p == 1
