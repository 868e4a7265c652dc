"""Layers out of host memory: the model's values, and where its weights are."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.execution.offload.placement import (
    arriving_bytes,
    device_weight_bytes,
    host_weight_bytes,
    most_offloaded,
)
from jdllm.execution.transformer import forward
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params, param_bytes
from jdllm.serving.packing import lay_out
from tests.helpers import Golden, slow

SEQUENCES = [np.arange(5) + 20, np.arange(210) % 300, np.arange(90) % 100]
WHOLE, CUT = ChunkConfig(), ChunkConfig(ffn=2, query=3)


def load(directory: Path, count: int) -> tuple[Params, ModelConfig]:
    """A model with the weights of so many layers in host memory."""
    config = dataclasses.replace(config_from_hf(directory), offloaded=count)
    return load_params(directory, config, "float32"), config


def hidden(params: Params, tokens: Any, rows: Any, *, config: ModelConfig, chunks: ChunkConfig) -> jax.Array:
    return forward(params, config, tokens, rows, chunks=chunks)


def on_host(leaf: jax.Array) -> bool:
    return leaf.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize(
    ("family", "count", "chunks"),
    [
        ("llada", 1, WHOLE),
        ("llada", 2, CUT),
        slow("dream", 2, WHOLE),
        slow("llada_moe", 1, WHOLE),
        slow("llada_moe", 2, CUT),
        slow("llama", 1, CUT),
    ],
)
def test_hidden_rows_are_those_of_the_whole_model(family: str, count: int, chunks: ChunkConfig):
    directory, executables = Golden(family).directory, Executables("cpu")
    (whole, config), (parts, in_parts) = load(directory, 0), load(directory, count)
    tokens, rows, _ = lay_out(SEQUENCES, config)
    expected, found = (
        np.asarray(executables.call(hidden, params, tokens, rows, config=model, chunks=chunks))
        for params, model in ((whole, config), (parts, in_parts))
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", ["llada", "llada_moe", "llada2", "qwen2"])
def test_weights_are_where_they_are_counted(family: str):
    directory = Golden(family).directory
    config = config_from_hf(directory)
    for count in range(most_offloaded(config) + 1):
        leaves = jax.tree.leaves(load(directory, count)[0])
        away = sum(leaf.nbytes for leaf in leaves if on_host(leaf))
        assert away == host_weight_bytes(config, "float32", count)
        here = sum(leaf.nbytes for leaf in leaves) - away
        arriving = arriving_bytes(away, count)
        assert device_weight_bytes(config, "float32", count) == here + arriving
        assert arriving == (2 * away // count if count else 0)
    assert device_weight_bytes(config, "float32", 0) == param_bytes(config, "float32")
