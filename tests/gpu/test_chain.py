"""Layers of a few rows as a chain of kernels: whether each one really waits for what it reads."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.shapes import BLOCK_SHAPES, CAUSAL_SHAPES, SHAPES
from benchmarks.steps.cached import random_cache
from jdllm.compiling.executables import Executables
from jdllm.execution.few_rows.chain import chains
from jdllm.execution.module import Transformer
from jdllm.execution.paged.decode import forward_decode, forward_decode_chained
from jdllm.execution.paged.forward import forward_reuse
from jdllm.execution.paged.place import Place
from jdllm.execution.paged.pool import PAGE_ROWS, KvArrays, pool_shape
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.split_attention import FRESH_UNIT, dense_table, split_attention, with_fresh_rows

pytestmark = pytest.mark.gpu

WIDE = dataclasses.replace(SHAPES["llada-8b"], num_layers=6)
NARROW = dataclasses.replace(
    WIDE, hidden_size=512, num_heads=4, num_kv_heads=4, intermediate_size=1024, num_layers=20
)
GROUPED = dataclasses.replace(SHAPES["dream-7b"], num_layers=6)
NORMED = dataclasses.replace(BLOCK_SHAPES["sdar-8b"], num_layers=6)
REPEATS = 50


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


@pytest.fixture(
    scope="module",
    params=[
        (WIDE, 4000, 32),
        (WIDE, 70, 64),
        (NARROW, 300, 32),
        (GROUPED, 4000, 32),
        (NORMED, 4000, 32),
        (dataclasses.replace(WIDE, kv_cache_dtype="fp8"), 4000, 32),
    ],
    ids=["long", "short", "narrow", "groups", "norms", "keys-in-8-bits"],
)
def operands(request: pytest.FixtureRequest) -> tuple[ModelConfig, tuple[Any, ...]]:
    config, cached, fresh = request.param
    params = Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16").params()
    k_pool, v_pool, table = random_cache(config, cached, fresh, 64, "bfloat16")
    tokens = jax.random.randint(jax.random.key(2), (fresh,), 0, config.defined_ids)
    unused = jnp.zeros(fresh, jnp.int32)
    rows = Rows(cached + jnp.arange(fresh), unused, unused)
    assert chains(params, config, fresh)
    return config, (params, tokens, rows, KvArrays(k_pool, v_pool), table)


def chain(params, tokens, rows, pool, table, *, config):
    return forward_reuse(params, config, tokens, rows, pool, table)


def layers(params, tokens, rows, pool, table, *, config):
    return forward_reuse(params, config, tokens, rows, pool, table, attention=split_attention)


@pytest.fixture(scope="module")
def in_a_graph(operands) -> np.ndarray:
    """What the chain's kernels make of it where each waits for the one before."""
    config, inputs = operands
    return np.asarray(Executables("gpu").compile(chain, *inputs, config=config)(*inputs))


def test_a_chain_gives_the_same_bits_every_time_and_those_of_kernels_that_do_not_overlap(
    operands, in_a_graph: np.ndarray
):
    config, inputs = operands
    overlapping = Executables("gpu").compile(chain, *inputs, config=config, chained=True)
    results = [overlapping(*inputs) for _ in range(REPEATS)]
    for result in results:
        np.testing.assert_array_equal(np.asarray(result).view(np.uint16), in_a_graph.view(np.uint16))


def test_a_chain_is_as_good_as_other_kernels(operands, in_a_graph: np.ndarray):
    config, inputs = operands
    expected = np.asarray(Executables("gpu").compile(layers, *inputs, config=config)(*inputs), np.float64)
    assert np.linalg.norm(in_a_graph.astype(np.float64) - expected) < 0.03 * np.linalg.norm(expected)


def decoded(params, tokens, positions, pool, place, table, *, config, forward):
    return forward(params, config, tokens, positions, pool, place, table)[0]


def sequences(config: ModelConfig, count: int, most: int) -> tuple[tuple[Any, ...], Any, Any]:
    """A token of each of some sequences of up to `most` stored ones; what it sees, fresh itself or stored."""
    pages, rng = most // PAGE_ROWS + 1, np.random.default_rng(0)
    stored = rng.integers(0, most + 1, count).astype(np.int32)
    keys = jax.random.split(jax.random.key(0))
    pool = KvArrays(
        *(jax.random.normal(key, pool_shape(config, count * pages, PAGE_ROWS), "bfloat16") for key in keys)
    )
    place = Place(np.arange(count, dtype=np.int32) * pages + stored // PAGE_ROWS, stored % PAGE_ROWS)
    fresh, with_own = (dense_table(stored + i, pages, PAGE_ROWS) for i in range(2))
    fresh = with_fresh_rows(fresh, FRESH_UNIT * np.arange(count), np.ones(count, np.int32), PAGE_ROWS)
    tokens = rng.integers(0, config.defined_ids, count).astype(np.int32)
    return (tokens, stored, pool, place), fresh, with_own


@pytest.fixture(scope="module")
def causal() -> tuple[ModelConfig, Params]:
    config = dataclasses.replace(CAUSAL_SHAPES["llama-3.1-8b"], num_layers=6)
    return config, Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16").params()


@pytest.mark.parametrize("count", [1, 8, 32, 64])
def test_decodes_in_a_chain(count: int, causal: tuple[ModelConfig, Params]):
    """The same bits every time, those of kernels that do not overlap; as good as other kernels."""
    config, params = causal
    inputs, fresh, stored = sequences(config, count, 2000)
    executables, chain = Executables("gpu"), (params, *inputs, fresh)
    static: Any = {"config": config, "forward": forward_decode_chained}
    in_a_graph = np.asarray(executables.compile(decoded, *chain, **static)(*chain))
    overlapping = executables.compile(decoded, *chain, chained=True, **static)
    for result in [overlapping(*chain) for _ in range(REPEATS)]:
        np.testing.assert_array_equal(np.asarray(result).view(np.uint16), in_a_graph.view(np.uint16))
    layers = params, *inputs, stored
    static = {"config": config, "forward": forward_decode}
    expected = np.asarray(executables.compile(decoded, *layers, **static)(*layers), np.float64)
    assert np.linalg.norm(in_a_graph.astype(np.float64) - expected) < 0.03 * np.linalg.norm(expected)
