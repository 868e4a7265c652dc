"""The engine by the kernels of a card: n steps for n, and no result from values that are not numbers."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.shapes import SHAPES
from jdllm import LLM, NonFiniteError, SamplingParams, Transformer
from jdllm.decoding.registry import cache_names
from jdllm.decoding.sampling import Cache

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(SHAPES["llada-8b"], num_layers=2)
POOL = "1GiB"
"""Others test on the card at the same time."""

SAMPLING = SamplingParams(gen_length=64, steps=64, block_length=32, early_stop=False)
PROMPTS = [np.random.default_rng(0).integers(0, 60_000, 704) for _ in range(16)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    assert jax.default_backend() == "gpu", "this lane needs a card"
    return Transformer(CONFIG, rngs=nnx.Rngs(0), dtype="bfloat16")


@pytest.mark.parametrize("cache", cache_names())
def test_a_generation_of_n_steps_evaluates_n(cache: Cache, model: Transformer):
    llm = LLM(model, max_num_batched_tokens=16 * 768, kv_pool=POOL)
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling=dataclasses.replace(SAMPLING, cache=cache))
    assert [o.nfe for o in outputs] == [64] * 16
    assert llm.engine.evaluated == 64


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_values_that_are_not_numbers_are_refused(cache: Cache, model: Transformer):
    params = model.params()
    layers = dict(params["layers"])
    layers["up"] = layers["up"].at[1, 5, 5].set(np.nan)
    llm = LLM(Transformer(CONFIG, {**params, "layers": layers}), kv_pool=POOL)
    with pytest.raises(NonFiniteError, match="'up' of layer 1"):
        llm.generate(prompt_token_ids=PROMPTS[:1], sampling=dataclasses.replace(SAMPLING, cache=cache))
