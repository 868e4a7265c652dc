"""Layers of a few rows as a chain of kernels, interpreted, against the same layers by XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.shapes import SHAPES
from benchmarks.steps.cached import random_cache
from jdllm.execution.few_rows.chain import chains
from jdllm.execution.paged.forward import forward_reuse
from jdllm.execution.paged.pool import KeyValuePool
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params, init_params
from jdllm.pallas.add_norm import api as add_norm_api
from jdllm.pallas.device import Target
from jdllm.pallas.skinny_matmul import api as skinny_api
from jdllm.pallas.split_attention import api as split_api
from jdllm.pallas.split_attention import split_attention

SIZES = {
    "hidden_size": 512,
    "num_heads": 4,
    "num_kv_heads": 4,
    "intermediate_size": 128,
    "num_layers": 2,
    "vocab_size": 100,
    "token_limit": 100,
    "mask_id": 99,
    "eos_id": 98,
    "eot_id": 97,
}
SMALL = dataclasses.replace(SHAPES["llada-8b"], **SIZES)
GROUPED = dataclasses.replace(SHAPES["dream-7b"], **SIZES | {"num_kv_heads": 2})
FRESH, CACHED = 32, 100


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """Kernels are chosen as on a Hopper card, and made for the interpreter."""
    for module in (add_norm_api, skinny_api, split_api):
        monkeypatch.setattr(module, "target", lambda: Target(True, 9.0))


def holds(config: ModelConfig, rows: int = FRESH, dtype: str = "bfloat16") -> bool:
    return chains(abstract_params(config, dtype), config, rows)


@pytest.mark.usefixtures("hopper")
def test_what_a_chain_can_take():
    assert holds(SHAPES["llada-8b"])
    assert holds(SHAPES["llada-8b"], 64)
    assert holds(SMALL)
    assert not holds(SHAPES["llada-8b"], 65)
    assert not holds(SHAPES["llada-8b"], dtype="float32")
    assert holds(SHAPES["dream-7b"])
    assert not holds(SHAPES["llada-moe-7b"])
    assert holds(dataclasses.replace(SMALL, num_kv_heads=2))
    assert not holds(dataclasses.replace(SMALL, hidden_size=640, num_heads=5, num_kv_heads=5))
    assert not holds(dataclasses.replace(SMALL, head_dim=48))
    half = dataclasses.replace(SMALL.rope, fraction=0.5)
    assert not holds(dataclasses.replace(SMALL, rope=half))


def test_none_elsewhere():
    assert not holds(SMALL)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("config", [SMALL, GROUPED], ids=["every-head", "groups-and-biases"])
def test_the_chain_computes_what_the_layers_do(config: ModelConfig, capsys: pytest.CaptureFixture[str]):
    params = init_params(config, jax.random.key(0), "bfloat16")
    for name in ("q_bias", "k_bias", "v_bias"):
        if name in params["layers"]:
            shape, key = params["layers"][name].shape, jax.random.key(len(name))
            params["layers"][name] = jax.random.normal(key, shape, "bfloat16")
    k_pool, v_pool, table = random_cache(config, CACHED, FRESH, 64, "bfloat16")
    tokens, unused = jnp.arange(FRESH) % 90, jnp.zeros(FRESH, jnp.int32)
    inputs = tokens, Rows(CACHED + jnp.arange(FRESH), unused, unused), KeyValuePool(k_pool, v_pool), table
    assert chains(params, config, FRESH)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        actual = np.asarray(forward_reuse(params, config, *inputs), np.float64)
    assert "RACE" not in capsys.readouterr().out
    xla = functools.partial(split_attention, implementation="xla")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, inputs[2]))
    exact = np.asarray(forward_reuse(wide[0], config, *inputs[:2], wide[1], table, attention=xla), np.float64)
    assert np.linalg.norm(actual - exact) < 0.02 * np.linalg.norm(exact)
