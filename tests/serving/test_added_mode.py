"""A way of generating from outside the package: one class, and models whose configuration names it use it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jdllm import Transformer
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.modes.denoising import Denoising
from jdllm.serving.modes.registry import register, unregister
from jdllm.serving.spec import RequestSpec

IN_PAIRS = "in pairs"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
SAMPLING = SamplingParams(gen_length=8, steps=8, block_length=4)


class InPairs(Denoising):
    """Denoises two tokens at a time, whatever a request says."""

    def spec(self, prompt: Any, sampling: SamplingParams, *others: Any, **named: Any) -> RequestSpec:
        return super().spec(prompt, sampling.changed(block_length=2), *others, **named)


@pytest.fixture
def mode() -> Iterator[None]:
    register(IN_PAIRS, InPairs())
    yield
    unregister(IN_PAIRS)


def open_llm(params: Params, config: ModelConfig, **changes: Any) -> LLM:
    model = Transformer(dataclasses.replace(config, **changes), params)
    return LLM(model, max_num_batched_tokens=128, progress=False)


def histories(llm: LLM, sampling: SamplingParams) -> list[Any]:
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling=sampling)
    return [(output.token_ids, output.committed_in) for output in outputs]


@pytest.mark.usefixtures("mode")
def test_a_model_generates_in_the_mode_that_its_configuration_names(params: Params, config: ModelConfig):
    llm = open_llm(params, config, attention=IN_PAIRS)
    bundled, pairs = open_llm(params, config), SAMPLING.changed(block_length=2)
    assert histories(llm, SAMPLING) == histories(bundled, pairs) != histories(bundled, SAMPLING)


def test_a_mode_that_nobody_registered_is_refused(params: Params, config: ModelConfig):
    with pytest.raises(ConfigError, match=r"no way of generating for attention 'in pairs' \(known: full, c"):
        open_llm(params, config, attention=IN_PAIRS)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("name", [IN_PAIRS, "full"])
def test_a_mode_is_registered_once(name: str):
    with pytest.raises(ConfigError, match=f"attention '{name}' is registered already"):
        register(name, InPairs())
