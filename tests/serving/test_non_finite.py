"""Values that are infinite or not numbers: an error that says where they began, and nothing sampled."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import NonFiniteError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.updates import StepUpdate
from tests.conftest import BUDGET

pytestmark = pytest.mark.usefixtures("shared_executables")

PROMPT = list(range(5, 12))
SAMPLING = SamplingParams(gen_length=8, block_length=4)


def slow(*values: object):
    return pytest.param(*values, marks=pytest.mark.slow)


def damaged(params: Params, leaf: str, layer: int | None, value: float) -> Params:
    """The weights with one value replaced."""
    tree: dict[str, Any] = jax.tree.map(np.array, params)
    array = tree[leaf] if layer is None else tree["layers"][leaf][layer]
    array[(3,) * array.ndim] = value
    return jax.tree.map(jax.numpy.asarray, tree)


@pytest.mark.parametrize(
    ("leaf", "layer", "value", "words"),
    [
        ("down", 1, np.nan, ["'down' of layer 1", "damaged"]),
        slow("q", 0, np.inf, ["'q' of layer 0"]),
        slow("head", None, -np.inf, ["'head'"]),
        slow("ffn_norm", 1, 1e38, ["layer 1"]),
    ],
)
def test_generation_and_scores_name_where_it_began(
    leaf: str, layer: int | None, value: float, words: list[str], params: Params, config: ModelConfig
):
    llm = LLM(Transformer(config, damaged(params, leaf, layer, value)), max_num_batched_tokens=BUDGET)
    seen: list[StepUpdate] = []
    with pytest.raises(NonFiniteError) as refused:
        llm.generate(prompt_token_ids=[PROMPT], sampling=SAMPLING, on_step=seen.append)
    assert not seen
    for word in ["request 0", *words]:
        assert word in str(refused.value)
    with pytest.raises(NonFiniteError, match="score") as refused:
        llm.score(PROMPT, PROMPT, mc_num=2)
    assert words[0] in str(refused.value)


def test_cached_steps_too(params: Params, config: ModelConfig):
    llm = LLM(Transformer(config, damaged(params, "up", 1, np.nan)), max_num_batched_tokens=BUDGET)
    with pytest.raises(NonFiniteError, match="'up' of layer 1"):
        llm.generate(prompt_token_ids=[PROMPT], sampling=dataclasses.replace(SAMPLING, cache="dual"))


@pytest.mark.slow
def test_float16_overflow_is_told_from_damage(params: Params, config: ModelConfig):
    large = jax.tree.map(lambda x: x.astype("float16"), params)
    large["layers"]["down"] = large["layers"]["down"].at[1].set(60000.0)
    llm = LLM(Transformer(config, large), max_num_batched_tokens=BUDGET)
    with pytest.raises(NonFiniteError, match=r"float16 in layer 1.*load it as bfloat16"):
        llm.generate(prompt_token_ids=[PROMPT], sampling=SAMPLING)
