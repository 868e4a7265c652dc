"""Layers of a few rows as a chain of kernels, interpreted, against the same layers by XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.shapes import BLOCK_SHAPES, CAUSAL_SHAPES, SHAPES
from benchmarks.steps.cached import random_cache
from jdllm.decoding.causal import decode, decodes_in_chain
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.few_rows import chain, streamed
from jdllm.execution.few_rows.chain import chains, chains_storing
from jdllm.execution.paged.forward import forward_reuse, forward_storing
from jdllm.execution.paged.place import Place
from jdllm.execution.paged.pool import PAGE_ROWS, KvArrays, pool_shape
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, abstract_params, init_params
from jdllm.pallas.add_norm import api as add_norm_api
from jdllm.pallas.device import Target
from jdllm.pallas.head_norm import api as head_norm_api
from jdllm.pallas.masked_logits import Level
from jdllm.pallas.skinny_matmul import api as skinny_api
from jdllm.pallas.split_attention import api as split_api
from jdllm.pallas.split_attention import split_attention
from jdllm.planning.ladder import Entry
from jdllm.serving.causal.packing import pack_sequences
from jdllm.serving.causal.request import CausalRequest, causal_spec
from jdllm.serving.pool.kv_pool import KvPool

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
NORMED = dataclasses.replace(BLOCK_SHAPES["sdar-8b"], **SIZES)
IN_8_BITS = dataclasses.replace(SMALL, kv_cache_dtype="fp8")
FRESH, CACHED = 32, 100


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """Kernels are chosen as on a Hopper card without Triton, and made for the interpreter."""
    for module in (add_norm_api, chain, head_norm_api, skinny_api, split_api, streamed):
        monkeypatch.setattr(module, "target", lambda: Target(True, 9.0, triton=False))


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
    assert holds(NORMED)
    assert not holds(dataclasses.replace(NORMED, num_kv_heads=2))
    half = dataclasses.replace(SMALL.rope, fraction=0.5)
    scaled = dataclasses.replace(SMALL.rope, query_beta=0.1, original_positions=64)
    assert not any(holds(dataclasses.replace(SMALL, rope=rope)) for rope in (half, scaled))
    assert holds(IN_8_BITS)
    assert not holds(IN_8_BITS, dtype="float16")


@pytest.mark.usefixtures("hopper")
def test_a_chain_stores_no_rows_in_8_bits():
    params = abstract_params(SMALL, "bfloat16")
    assert chains_storing(params, SMALL, FRESH)
    assert not chains_storing(params, IN_8_BITS, FRESH)


def test_none_elsewhere():
    assert not holds(SMALL)


def weights(config: ModelConfig) -> Params:
    """Random ones, biases and norms of heads among them."""
    params = init_params(config, jax.random.key(0), "bfloat16")
    for name in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"):
        if name in params["layers"]:
            shape, key = params["layers"][name].shape, jax.random.key(len(name))
            params["layers"][name] = jax.random.normal(key, shape, "bfloat16")
    return params


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "config",
    [SMALL, GROUPED, NORMED, IN_8_BITS],
    ids=["every-head", "groups-and-biases", "norms", "keys-in-8-bits"],
)
def test_the_chain_computes_what_the_layers_do(config: ModelConfig, capsys: pytest.CaptureFixture[str]):
    params = weights(config)
    k_pool, v_pool, table = random_cache(config, CACHED, FRESH, 64, "bfloat16")
    tokens, unused = jnp.arange(FRESH) % 90, jnp.zeros(FRESH, jnp.int32)
    inputs = tokens, Rows(CACHED + jnp.arange(FRESH), unused, unused), KvArrays(k_pool, v_pool), table
    assert chains(params, config, FRESH)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        actual = np.asarray(forward_reuse(params, config, *inputs), np.float64)
    assert "RACE" not in capsys.readouterr().out
    xla = functools.partial(split_attention, implementation="xla")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, inputs[2]))
    exact = np.asarray(forward_reuse(wide[0], config, *inputs[:2], wide[1], table, attention=xla), np.float64)
    assert np.linalg.norm(actual - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_a_chain_stores_what_the_layers_do(capsys: pytest.CaptureFixture[str]):
    """The first eight rows go behind the cached ones, and nothing else changes."""
    params, stored = weights(NORMED), np.arange(FRESH) < 8
    *pool, table = random_cache(NORMED, CACHED, FRESH, PAGE_ROWS, "bfloat16")
    page = np.where(stored, np.asarray(table.pages)[CACHED // PAGE_ROWS], 1000 + np.arange(FRESH))
    place = Place(page.astype(np.int32), (CACHED + np.arange(FRESH, dtype=np.int32)) % PAGE_ROWS)
    tokens, unused = jnp.arange(FRESH) % 90, jnp.zeros(FRESH, jnp.int32)
    inputs = tokens, Rows(CACHED + jnp.arange(FRESH), unused, unused)
    assert chains(params, NORMED, FRESH)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        _, written = forward_storing(params, NORMED, *inputs, KvArrays(*pool), table, place)
    assert "RACE" not in capsys.readouterr().out
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, KvArrays(*pool)))
    _, exact = forward_storing(wide[0], NORMED, *inputs, wide[1], table, place)
    for before, mine, theirs in zip(wide[1], written, exact, strict=True):
        changed = np.asarray(theirs != before)
        assert changed.any(axis=(0, 2, 4)).sum() == stored.sum()
        difference = np.abs(np.asarray(mine, np.float64) - np.asarray(theirs, np.float64))
        assert difference[changed].max() < 0.15
        assert not difference[~changed].any()


@pytest.mark.usefixtures("hopper")
def test_what_decodes_in_a_chain():
    """Up to 64 rows: of sequences that fill no blocks each has as many as a block."""
    config = CAUSAL_SHAPES["llama-3.1-8b"]
    params = abstract_params(config, "bfloat16")
    chained = [count for count in range(1, 100) if decodes_in_chain(params, config, count)]
    assert chained == [*range(1, 9), *range(16, 65, 8)]
    assert not decodes_in_chain(params, dataclasses.replace(config, sliding_window=4096), 8)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("segments", [4, 8])
def test_decodes_in_a_chain_are_those_of_the_layers(segments: int, capsys: pytest.CaptureFixture[str]):
    """Of three sequences one fills a page, one begins a page and one sees two."""
    config = dataclasses.replace(CAUSAL_SHAPES["llama-3.1-8b"], **SIZES | {"num_kv_heads": 2})
    params = init_params(config, jax.random.key(0), "bfloat16")
    requests, sampling = [], SamplingParams(max_tokens=4, early_stop=False)
    pages = KvPool(config, "bfloat16", 16)
    for number, length in enumerate((64, 65, 100)):
        request = CausalRequest(causal_spec(np.arange(length) % 90, sampling, config), number)
        pages.admit(request)
        request.computed = length - 1
        requests.append(request)
    shape = pool_shape(config, 16, PAGE_ROWS)
    keys = jax.random.split(jax.random.key(1))
    pool = KvArrays(*(jax.random.normal(key, shape, "bfloat16") for key in keys))
    packed = pack_sequences(requests, config, pages.book, Entry(segments, segments, segments, 1), 40)
    arguments = params, *packed.arguments, jnp.int32(1), pool
    assert decodes_in_chain(params, config, segments)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        (trace, _), written = decode(*arguments, config=config, level=Level.TOP)
    assert "RACE" not in capsys.readouterr().out
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, pool))
    (exact, _), stored = decode(
        wide[0], *packed.arguments, jnp.int32(1), wide[1], config=config, level=Level.TOP
    )
    np.testing.assert_array_equal(trace.committed, exact.committed)
    np.testing.assert_allclose(trace.logprobs[0], exact.logprobs[0], atol=0.1)
    for before, mine, theirs in zip(wide[1], written, stored, strict=True):
        changed = np.asarray(theirs != before)
        assert changed.any(axis=(0, 2, 4)).sum() == 3
        difference = np.abs(np.asarray(mine, np.float64) - np.asarray(theirs, np.float64))
        assert difference[changed].max() < 0.15
        assert not difference[~changed].any()
