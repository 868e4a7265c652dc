"""A family from outside the package: one declaration, and its checkpoints load, convert and generate."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from jdllm.checkpoints.conversion import to_native
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.llm import LLM
from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.families import decoder
from jdllm.models.families.decoder import causal_config
from jdllm.models.registry import Family, register, unregister
from tests.helpers import Golden

LLAMA = Golden("llama")
NAMES = {path: f"alpaca/{name}" for path, name in decoder.TENSOR_NAMES.items()}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """A Llama's configuration with another name for the number of layers."""
    renamed = {**values, "num_hidden_layers": values["depth"]}
    return causal_config(renamed, HfFields(renamed, "Alpaca"), family="alpaca", default_theta=10000.0)


ALPACA = Family("alpaca", ("AlpacaForCausalLM",), ("alpaca",), config_from_hf, NAMES)


@pytest.fixture
def family() -> Iterator[Family]:
    register(ALPACA)
    yield ALPACA
    unregister(ALPACA)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The recorded Llama as a checkpoint of the family."""
    values = LLAMA.json("config")
    values["depth"] = values.pop("num_hidden_layers")
    values |= {"architectures": ["AlpacaForCausalLM"], "model_type": "alpaca"}
    directory = tmp_path / "alpaca"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    tensors = {f"alpaca/{name}": tensor for name, tensor in LLAMA.tensors("model").items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def generated(directory: Path) -> list[int]:
    llm = LLM(directory, max_num_batched_tokens=256, kv_pool="8MiB", progress=False)
    return llm.generate(prompt_token_ids=[[1, 5, 9]], sampling=SamplingParams(gen_length=8))[0].token_ids


@pytest.mark.usefixtures("family")
def test_the_same_weights_generate_the_same_tokens(checkpoint: Path, tmp_path: Path):
    to_native(checkpoint, tmp_path / "native")
    expected = generated(LLAMA.directory)
    assert generated(checkpoint) == generated(tmp_path / "native") == expected


def test_nothing_is_left_of_a_family_that_was_taken_back(checkpoint: Path):
    with pytest.raises(ConfigError, match=r"unknown model family .*AlpacaForCausalLM"):
        generated(checkpoint)


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "family 'alpaca' is registered already"),
        ({"name": "other"}, "architecture 'AlpacaForCausalLM' is registered already"),
        ({"name": "other", "architectures": ()}, "model_type 'alpaca' is registered already"),
    ],
)
def test_names_are_taken_once(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        register(ALPACA._replace(**change))
