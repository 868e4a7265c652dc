"""Layers in host memory on a card: steps have the values of the whole model."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.transformer import forward
from jdllm.host_memory import to_host
from jdllm.models.config import ModelConfig
from jdllm.models.weights import HOST_LAYERS, Params, init_params, tree_bytes
from jdllm.serving.packing import lay_out
from jdllm.serving.request import Request
from tests.engines import engine_of, finish, generation_request

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(
    SHAPES["llada-8b"], num_layers=6, hidden_size=1024, num_heads=8, num_kv_heads=8, intermediate_size=3072
)
AWAY = 4
SEQUENCES = [np.arange(700) + 20, np.arange(33) % 300]
CHUNKS = [ChunkConfig(), ChunkConfig(ffn=4, query=4, kv=4)]
CACHES: list[dict[str, Any]] = [
    {"cache": "none"},
    {"cache": "dual"},
    {"cache": "head_sparse", "retention": 0.5},
]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def whole(request: pytest.FixtureRequest) -> Params:
    return init_params(CONFIG, jax.random.key(0), request.param)


def in_part(params: Params) -> tuple[Params, ModelConfig]:
    """The model with the weights of some layers in host memory, and its configuration."""
    here = {name: leaf[:-AWAY] for name, leaf in params["layers"].items()}
    away = {name: to_host(leaf[-AWAY:], jax.devices()[0]) for name, leaf in params["layers"].items()}
    assert all(leaf.sharding.memory_kind == "pinned_host" for leaf in away.values())
    return params | {"layers": here, HOST_LAYERS: away}, dataclasses.replace(CONFIG, offloaded=AWAY)


def hidden(params: Params, tokens: Any, rows: Any, *, config: ModelConfig, chunks: ChunkConfig) -> jax.Array:
    return forward(params, config, tokens, rows, chunks=chunks)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_hidden_rows_are_those_of_the_whole_model(whole: Params, chunks: ChunkConfig):
    executables = Executables("cuda")
    tokens, rows, _ = lay_out(SEQUENCES, CONFIG)
    parts, config = in_part(whole)
    found, expected = (
        np.asarray(executables.call(hidden, params, tokens, rows, config=model, chunks=chunks), np.float32)
        for params, model in ((parts, config), (whole, CONFIG))
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize("options", CACHES, ids=lambda options: options["cache"])
def test_tokens_in_float32_are_those_of_the_whole_model(options: dict[str, Any]):
    params, executables = init_params(CONFIG, jax.random.key(0), "float32"), Executables("cuda")
    sampling = SamplingParams(gen_length=32, block_length=16, steps=16, early_stop=False, **options)

    def tokens(weights: Params, config: ModelConfig) -> list[list[int]]:
        engine = engine_of(weights, config, executables, 1024, pages=16)
        asked: list[Request] = [
            generation_request(i, prompt, sampling, config) for i, prompt in enumerate(SEQUENCES)
        ]
        ended = finish(engine, asked)[1]
        engine.close()
        return [state.tokens.tolist() for state in ended]

    assert tokens(*in_part(params)) == tokens(params, CONFIG)


def test_host_layers_take_no_memory_of_the_device():
    params = init_params(CONFIG, jax.random.key(0), "bfloat16")
    stats = jax.devices()[0].memory_stats
    before = (stats() or {})["bytes_in_use"]
    parts, _ = in_part(params)
    jax.block_until_ready(parts)  # a slice of a stack lives until it is copied
    copies = tree_bytes(parts["layers"])
    assert (stats() or {})["bytes_in_use"] - before < copies + tree_bytes(parts[HOST_LAYERS]) // 10
