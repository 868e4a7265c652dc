"""What a request may ask for."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from jdllm.decoding.causal_sampling import check_denoising
from jdllm.decoding.rules import segment_row
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import JdllmError, RequestError
from jdllm.models.config import ModelConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gen_length", 0),
        ("gen_length", 1.5),
        ("gen_length", None),
        ("gen_length", True),
        ("gen_length", 10**9),
        ("gen_length", 10**20),
        pytest.param("gen_length", 10**5000, id="gen_length-digits"),
        ("gen_length", np.float32(8)),
        ("steps", 2**24 + 1),
        ("max_tokens", 0),
        ("max_tokens", "64"),
        ("max_lookahead", 10**9),
        ("pool_kernel", 2**24 + 1),
        ("pool_kernel", 4),
        ("retention", 0),
        ("retention", 1.5),
        ("refresh_delay", -1),
        ("refresh_interval", 2.5),
        ("early_stop", "false"),
        ("early_stop", 0),
        ("early_stop", np.int64(1)),
        ("return_history", None),
        ("priority", 0.5),
        ("priority", 2**31),
        ("logits_eos_inf", 1.0),
        ("threshold_strict", "true"),
        ("official_forcing", 1),
        ("n", 0),
        ("n", 10**6),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", 1.0),
        ("logprobs", "yes"),
        ("stop", ""),
        ("stop", b"x"),
        ("stop", ["x", 3]),
        ("stop_token_ids", -1),
        ("stop_token_ids", ["x"]),
        ("min_p", 1.5),
        ("steps", 0),
        ("steps", -4),
        ("block_length", 0),
        ("block_length", "8"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.1),
        ("repetition_penalty", 2e6),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", None),
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
        ("seed", -2),
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
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_p", "0.5"),
        ("top_k", -2),
        ("max_tokens", -2),
        ("top_k", 2.0),
        ("top_k", True),
        ("quota", "mean"),
        ("undefined_tokens", "forbidden"),
        ("undefined_tokens", False),
    ],
)
def test_a_bad_value_is_named_with_its_field(field: str, value: object):
    with pytest.raises(RequestError, match=f"^{field} is .{{1,60}}, expected [^\n]+$"):
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]


EFFECTS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"threshold": 0.9}, {}, {"transfer": "threshold"}),
    ({"threshold": 0.9}, {"alg": "entropy"}, {"alg": "confidence_threshold"}),
    ({"threshold_strict": False}, {"transfer": "factor"}, {"transfer": "threshold"}),
    ({"factor": 1.0}, {"transfer": "threshold"}, {"transfer": "factor"}),
    ({"factor_end": "official"}, {}, {"transfer": "factor"}),
    ({"entropy_bound": 0.1}, {"transfer": "margin"}, {"transfer": "entropy_bound"}),
    ({"mixture_weight": 0.5}, {}, {"transfer": "adaptive"}),
    ({"max_lookahead": 32}, {"transfer": "factor"}, {"transfer": "adaptive"}),
    ({"retention": 0.5}, {"cache": "dual"}, {"cache": "sparse"}),
    ({"pool_kernel": 1001}, {}, {"cache": "head_sparse"}),
    ({"refresh_delay": 0}, {}, {"cache": "prefix"}),
    ({"refresh_interval": 0}, {}, {"cache": "selective"}),
    ({"official_forcing": False}, {}, {"cache": "dual"}),
    ({"alg_temp": 0.5}, {"alg": "origin"}, {"alg": "confidence_threshold"}),
    ({"eps": 1e-3}, {"alg": "confidence_threshold"}, {"alg": "origin"}),
    ({"quota": "batch"}, {"alg": "origin"}, {"alg": "entropy"}),
]


@pytest.mark.parametrize(("option", "without", "with_it"), EFFECTS)
def test_a_parameter_without_effect_is_refused(
    option: dict[str, Any], without: dict[str, Any], with_it: dict[str, Any]
):
    (name,) = option
    with pytest.raises(RequestError, match=rf"^{name} has no effect here: it needs [^\n]+$"):
        SamplingParams(**option, **without)
    assert getattr(SamplingParams(**option, **with_it), name) == option[name]
    assert SamplingParams(**option, **with_it).changed(**{**dict.fromkeys(with_it), **BARE, **without}) == (
        SamplingParams(**without)
    )


@pytest.mark.parametrize(
    ("before", "named"),
    [
        ({"alg": "origin", "eps": 1e-2, "top_k": 50}, {"transfer": "adaptive"}),
        ({"cache": "head_sparse", "retention": 0.4, "suffix_window": 4}, {"transfer": "adaptive"}),
        ({"cache": "dual", "official_forcing": True}, {"transfer": "adaptive", "cache": "dual"}),
        ({"temperature": 0.5, "top_p": 0.9}, {"transfer": "adaptive", "temperature": 0.5}),
        ({"alg": "entropy", "alg_temp": 0.1}, {"transfer": "factor"}),
        ({"transfer": "threshold", "threshold": 0.8}, {"alg": "entropy"}),
        ({"remasking": "random"}, {"alg": "origin"}),
        ({"alg": "entropy", "alg_temp": 0.1, "steps": 8}, {"structure": {"choice": ("a", "b")}}),
    ],
)
def test_a_new_rule_takes_the_place_of_what_it_excludes(before: dict[str, Any], named: dict[str, Any]):
    assert SamplingParams(**before).changed(**named) == SamplingParams(**named)


def test_what_is_named_together_still_excludes():
    with_alg = SamplingParams().changed(structure={"choice": ("a", "b")}, alg="entropy")
    with pytest.raises(RequestError, match=r"structure commits one token .*: leave alg "):
        check_denoising(with_alg)
    with pytest.raises(RequestError, match="alg 'origin' brings its own order"):
        SamplingParams().changed(alg="origin", transfer="adaptive")
    with pytest.raises(RequestError, match="'sparse' keeps the best only: choose another cache"):
        SamplingParams(transfer="adaptive").changed(cache="sparse")


def test_a_cache_and_blocks_stay_where_a_verifier_decides():
    before = {"block_length": 32, "cache": "dual", "refresh_interval": 4}
    assert SamplingParams(**before).changed(transfer="adaptive") == SamplingParams(
        **before, transfer="adaptive"
    )


BARE = {"transfer": "schedule", "cache": "none", "temperature": 0.0, "alg": None}


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_filters_without_a_temperature_change_nothing(option: dict[str, Any], config: ModelConfig):
    name: Any = next(iter(option))
    greedy = SamplingParams(**option)
    assert not greedy.filtered
    assert str(segment_row(greedy, config)) == str(segment_row(SamplingParams(), config))
    drawn: list[dict[str, Any]] = [{"temperature": 0.5}, {"alg": "entropy"}]
    for fields in drawn:
        again = greedy.changed(**fields)
        assert again == SamplingParams(**option, **fields)
        assert again.filters == option
    assert SamplingParams(**option, transfer="adaptive").adaptive
    with pytest.raises(RequestError, match=f"^transfer 'adaptive' draws from whole .*: leave {name}"):
        SamplingParams(**option, transfer="adaptive", temperature=0.5)


def test_filters_that_let_everything_pass_need_nothing():
    assert SamplingParams(top_p=1, min_p=0).top_p == 1
    assert not SamplingParams(top_p=1, min_p=0, temperature=1.0).filtered


@pytest.mark.parametrize(("name", "values"), [("top_k", (-1, 0)), ("seed", (-1,)), ("max_tokens", (-1,))])
def test_numbers_that_stand_for_nothing(name: str, values: tuple[int, ...]):
    for value in (*values, *map(np.int64, values)):
        given: dict[str, Any] = {name: value}
        assert getattr(SamplingParams(**given), name) is None


def test_max_tokens_asks_for_whole_blocks():
    assert SamplingParams(max_tokens=50).gen_length == 50
    assert SamplingParams(max_tokens=50, block_length=32).gen_length == 64
    assert SamplingParams(max_tokens=50, gen_length=96).gen_length == 96
    with pytest.raises(RequestError, match="max_tokens is 50, more than gen_length 32: leave gen_length out"):
        SamplingParams(max_tokens=50, gen_length=32)
    assert SamplingParams(block_length=8).changed(max_tokens=300).gen_length == 304


def test_the_official_preset_filters_as_the_published_call_does():
    assert SamplingParams.official() == SamplingParams(alg="origin", top_k=50)
    assert SamplingParams.official("entropy", top_k=None, steps=8) == SamplingParams(alg="entropy", steps=8)
    assert SamplingParams(alg="entropy").top_k is None


def test_unknown_names_are_refused():
    with pytest.raises(RequestError, match=r"^there is no parameter tempreture$"):
        SamplingParams(tempreture=1)  # pyright: ignore[reportCallIssue]


def test_numpy_scalars_are_those_of_python():
    made = SamplingParams(
        gen_length=np.int64(16),  # pyright: ignore[reportArgumentType]
        temperature=np.float32(0.5),  # pyright: ignore[reportArgumentType]
        early_stop=np.bool_(False),  # pyright: ignore[reportArgumentType]
        stop_token_ids=np.array([3, 4]),  # pyright: ignore[reportArgumentType]
        remasking=np.str_("random"),  # pyright: ignore[reportArgumentType]
    )
    plain = SamplingParams(
        gen_length=16, temperature=0.5, early_stop=False, stop_token_ids=(3, 4), remasking="random"
    )
    assert made == plain
    assert hash(made) == hash(plain)
    assert type(made.gen_length) is int
    assert made.early_stop is False


def test_stops_are_one_or_several():
    assert SamplingParams(stop="x").stop == ("x",)  # pyright: ignore[reportArgumentType]
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")  # pyright: ignore[reportArgumentType]
    assert SamplingParams(stop=None, stop_token_ids=7).stop == ()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "count", "listed"),
    [
        (None, None, 0),
        (False, None, 0),
        (True, 0, 0),
        (0, 0, 0),
        (1, 1, 1),
        (20, 20, 20),
        (np.int64(3), 3, 3),
    ],
)
def test_logprobs_are_counted_as_in_vllm(given: Any, count: int | None, listed: int):
    made = SamplingParams(logprobs=given)
    assert (made.logprobs, made.listed) == (count, listed)
    assert type(made.logprobs) is not bool
    assert made.changed(seed=3).logprobs == count


def test_a_schema_of_the_same_declaration_has_the_bounds():
    schema = TypeAdapter(SamplingParams).json_schema()["properties"]
    assert schema["gen_length"]["maximum"] == 2**24
    assert schema["transfer"]["enum"][0] == "schedule"
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == schema.keys()
    unbounded = {
        name
        for name, part in schema.items()
        for kind in part.get("anyOf", [part])
        if kind.get("type") in ("integer", "number") and not {"maximum", "exclusiveMaximum"} & kind.keys()
    }
    assert not unbounded


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
        ({"repetition_penalty": 1.1}, False),
        ({"transfer": "threshold"}, True),
        ({"transfer": "falling_threshold"}, True),
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
