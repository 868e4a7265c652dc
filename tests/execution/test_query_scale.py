"""Queries that grow with their position (`RopeConfig.query_beta`), however the layers are run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm import LLM, SamplingParams, Transformer
from jdllm.chunks import ChunkConfig
from jdllm.execution.transformer import Wanted, forward, forward_wanted, logits
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.rotary import rotation_at
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params, init_params
from tests.helpers import Golden
from tests.models import numpy_transformer

SCALED = {"query_beta": 0.8, "original_positions": 7}
close = functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=2e-4)
IDS = np.random.default_rng(0).integers(0, 90, 37)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    llama = config_from_hf(Golden("llama").directory)
    rope = dataclasses.replace(llama.rope, **SCALED)
    return dataclasses.replace(llama, rope=rope, attention="full", num_layers=2, vocab_size=90)


@pytest.fixture(scope="module")
def params(config: ModelConfig) -> Params:
    """Weights large enough that the queries count."""
    drawn = init_params(config, jax.random.key(0), "float32")
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, drawn)


def packed(params: Params, config: ModelConfig, chunks: ChunkConfig) -> np.ndarray:
    rows = Rows(np.arange(len(IDS)), *key_ranges(config, 0, len(IDS)))
    run = jax.jit(lambda params: logits(params, config, forward(params, config, IDS, rows, chunks=chunks)))
    return np.asarray(run(params))


def test_the_scale_is_the_published_one():
    rope = dataclasses.replace(config_from_hf(Golden("llama").directory).rope, **SCALED)
    positions = np.array([0, 6, 7, 13, 14, 700])
    scale = rotation_at(rope, 16, positions).query_scale
    assert scale is not None
    np.testing.assert_allclose(scale, 1 + 0.8 * np.log([1, 1, 2, 2, 3, 101]), rtol=1e-6)


def test_logits_are_those_of_numpy(params: Params, config: ModelConfig):
    expected = numpy_transformer.logits(params, config, IDS)
    unscaled = dataclasses.replace(config, rope=dataclasses.replace(config.rope, query_beta=0.0))
    assert np.abs(expected - numpy_transformer.logits(params, unscaled, IDS)).max() > 0.1
    close(packed(params, config, ChunkConfig()), expected)
    close(Transformer(config, params)(jnp.asarray(IDS[None]))[0], expected)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, params: Params, config: ModelConfig):
    monkeypatch.setattr("jdllm.chunks.TILE", 1)
    cut = packed(params, config, ChunkConfig(query=3, kv=2, heads=2))
    close(cut, packed(params, config, ChunkConfig()))


def test_rows_that_are_wanted_are_those_of_all_rows(params: Params, config: ModelConfig):
    rows = Rows(np.arange(len(IDS)), *key_ranges(config, 0, len(IDS)))
    wanted = Wanted(np.array([20, 3, 36]), np.ones(3, bool))
    some = jax.jit(lambda params: forward_wanted(params, config, IDS, rows, wanted))(params)
    close(logits(params, config, some), packed(params, config, ChunkConfig())[[20, 3, 36]])


def test_stored_rows_are_seen_by_scaled_queries(params: Params, config: ModelConfig):
    """The engine reads a prompt in parts, and then decodes; the module evaluates all of it at once."""
    model = Transformer(dataclasses.replace(config, attention="causal"), params)
    with LLM(model, max_num_batched_tokens=16, kv_pool="1MiB", progress=False) as llm:
        sampling = SamplingParams(gen_length=8, logprobs=0)
        (output,) = llm.generate(prompt_token_ids=[IDS.tolist()], sampling=sampling)
    whole = jnp.asarray([*IDS, *output.token_ids])[None]
    expected = np.asarray(jax.nn.log_softmax(model(whole)[0]))[len(IDS) - 1 : -1]
    assert len(output.token_ids) == 8
    np.testing.assert_array_equal(output.token_ids, expected.argmax(axis=-1))
    close(np.array(output.logprobs, float), expected.max(axis=-1))
