"""What a checkpoint's generation_config.json asks of the sampler."""

import json
from pathlib import Path
from typing import Any

import pytest

from jdllm.decoding.generation_defaults import default_sampling
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.errors import CheckpointError

BOOKKEEPING = {"_from_model_config": True, "eos_token_id": [2, 3], "transformers_version": "4.46.2"}


@pytest.fixture
def stated(tmp_path: Path):
    def read(values: dict[str, Any], **how: bool) -> SamplingParams:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        return default_sampling(tmp_path, **how)

    return read


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        (BOOKKEEPING | {"max_length": 4096, "repetition_penalty": 1.05, "presence_penalty": 1}, {}),
        (
            {"alg": "origin", "alg_temp": None, "eps": 0.001, "steps": 512, "temperature": 0.0, "top_k": 50},
            {"alg": "origin", "eps": 0.001, "steps": 512, "top_k": 50},
        ),
        (
            {"alg": "entropy", "alg_temp": 0.1, "top_p": 0.95},
            {"alg": "entropy", "alg_temp": 0.1, "top_p": 0.95},
        ),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, {}),
        ({"temperature": 1.0, "top_k": 0, "eps": 1e-3}, {"temperature": 1.0}),
        ({"temperature": 1.0, "top_k": -1}, {"temperature": 1.0}),
        ({"max_new_tokens": 64}, {"gen_length": 64}),
        ({"max_new_tokens": 64, "gen_length": 32}, {"gen_length": 32}),
        (
            {"transfer": "threshold", "threshold": 0.8, "stop": ["x"], "cache": "dual"},
            {"transfer": "threshold", "threshold": 0.8, "stop": ("x",), "cache": "dual"},
        ),
    ],
)
def test_what_the_file_states(values: dict[str, Any], expected: dict[str, Any], stated):
    assert stated(values) == SamplingParams(**expected)


LLAMA = {"bos_token_id": 128000, "do_sample": True, "max_length": 4096, "temperature": 0.6, "top_p": 0.9}
QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (BOOKKEEPING, {}),
        (BOOKKEEPING | LLAMA, {"temperature": 0.6, "top_p": 0.9}),
        (QWEN, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}),
        (QWEN | {"do_sample": False}, {"repetition_penalty": 1.05}),
        (QWEN | {"do_sample": None}, {"repetition_penalty": 1.05}),
        ({"temperature": 0.6, "top_k": 50, "top_p": 0.95, "min_p": 0.1}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_k": 0}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": -1}, {"temperature": 0.6}),
        ({"do_sample": True, "min_p": 0.05}, {"temperature": 1.0, "min_p": 0.05}),
        ({"max_new_tokens": 2048, "repetition_penalty": 1}, {"gen_length": 2048}),
        ({"eps": 1e-3, "alg_temp": 0.5}, {}),
        ({"stop": ["x"], "early_stop": False}, {"stop": ("x",), "early_stop": False}),
    ],
)
def test_what_a_causal_model_makes_of_it(values: dict[str, Any], expected: dict[str, Any], stated):
    assert stated(values, causal=True) == SamplingParams(**expected)


def test_without_the_file_a_causal_model_is_greedy(tmp_path: Path):
    assert default_sampling(tmp_path, causal=True) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a number from"),
        ({"do_sample": True, "top_k": -2}, "top_k is -2, expected an integer from 1"),
        ({"do_sample": 1}, "do_sample is 1, expected true or false"),
        ({"steps": 64}, "steps is for models that denoise: a causal model generates one token"),
        ({"alg": "entropy"}, "alg is for models that denoise"),
    ],
)
def test_a_bad_value_of_a_causal_model_names_file_and_key(values: dict[str, Any], reason: str, stated):
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {reason}"):
        stated(values, causal=True)


@pytest.mark.parametrize("penalty", [1.05, 0, "high"])
def test_a_model_that_denoises_has_no_penalty(penalty: object, stated):
    assert stated({"repetition_penalty": penalty}) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected an integer from 1"),
        ({"gen_length": 1.5}, "gen_length is 1.5, expected an integer"),
        ({"do_sample": "no"}, "do_sample is 'no', expected true or false"),
        ({"top_k": 1.5, "alg": "entropy"}, "top_k is 1.5, expected an integer from 1"),
        ({"threshold": 0.8}, "threshold has no effect here"),
        ({"alg": "fastest"}, "alg is 'fastest', expected one of 'origin'"),
    ],
)
def test_a_bad_value_names_file_and_key(values: dict[str, Any], reason: str, stated):
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {reason}"):
        stated(values)


def test_a_file_that_is_no_object_is_refused(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json holds a list"):
        default_sampling(tmp_path)


def test_without_the_file_dream_filters_nothing(tmp_path: Path):
    assert default_sampling(tmp_path) == SamplingParams()
    assert default_sampling(tmp_path).top_k is None


def test_the_bundled_model_generates_what_it_was_trained_at():
    assert default_sampling(checkpoint_path()) == SamplingParams(gen_length=32)
