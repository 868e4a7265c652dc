"""The cached step computes what the transformer computes over all rows."""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.record import Ceilings, Sustained
from benchmarks.shapes import SHAPES
from benchmarks.steps import cached as cached_step
from benchmarks.steps.cached import denoise, main
from jdllm.execution.transformer import embed, logits, packed_ranges
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Layer
from jdllm.models.weights import Params, init_params
from jdllm.pallas.split_attention import dense_table, with_fresh_rows
from tests.benchmarks.shapes import small

CACHED, FRESH, PAGE_ROWS = 100, 8, 64


@functools.partial(jax.jit, static_argnums=1)
def full(
    params: Params, config: ModelConfig, tokens: np.ndarray
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Best tokens of the fresh rows, and every layer's keys and values of the cached rows.

    Fresh rows see all rows, cached rows the cached ones.
    """
    positions = np.arange(CACHED + FRESH)
    ends = np.where(positions < CACHED, CACHED, CACHED + FRESH)
    rows = Rows(positions, np.zeros_like(positions), ends)
    h, cache, sees = embed(params, tokens), [], packed_ranges(config, rows)
    for index in range(config.num_layers):
        layer = Layer({name: leaf[index] for name, leaf in params["layers"].items()}, config)
        k, v = layer.project(h, sees.rotation, ("k", "v"))
        cache.append((k[:CACHED], v[:CACHED]))
        h, _ = layer.apply(h, sees)
    return logits(params, config, h[CACHED:]).argmax(axis=1), cache


@pytest.mark.slow
def test_two_steps_against_the_cache_are_those_over_all_rows():
    config = small("dream-7b")
    params = jax.tree.map(lambda x: 4 * x, init_params(config, jax.random.key(1), "float32"))
    tokens = np.random.default_rng(0).integers(0, 80, CACHED + FRESH)
    pages = -(-CACHED // PAGE_ROWS)
    order = np.arange(pages)[::-1].astype(np.int32)
    once, cache = full(params, config, tokens)
    heads = config.num_kv_heads, config.head_dim
    pools = np.zeros((2, config.num_layers, pages * PAGE_ROWS, *heads), np.float32)
    for place, keys_values in enumerate(cache):
        pools[:, place, :CACHED] = np.stack(keys_values)
    pools = pools.reshape(2, config.num_layers, pages, PAGE_ROWS, *heads)
    k_pool, v_pool = jnp.asarray(np.swapaxes(pools, 3, 4)[:, :, order])
    table = dense_table(np.array([CACHED], np.int32), pages, PAGE_ROWS)._replace(pages=order)
    table = with_fresh_rows(table, np.array([0]), np.array([FRESH]), PAGE_ROWS)
    twice, _ = full(params, config, np.concatenate([tokens[:CACHED], once]))

    run = jax.jit(functools.partial(denoise, config=config, form="xla", steps=2))
    actual = run(params, k_pool, v_pool, table, tokens[CACHED:], CACHED)
    np.testing.assert_array_equal(actual, twice)
    assert (once != twice).any()


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["auto", "fp8"])
def test_a_measured_step_has_the_state_of_the_card_at_work(keys: Any, monkeypatch: pytest.MonkeyPatch):
    config = dataclasses.replace(small("dream-7b"), kv_cache_dtype=keys)
    monkeypatch.setitem(SHAPES, "small", config)
    monkeypatch.setattr(cached_step, "sustained", lambda run: Sustained(0.032, {"watts": float(run().size)}))
    args = argparse.Namespace(shape="small", fresh=FRESH, cached=CACHED, page_rows=PAGE_ROWS)
    params = init_params(config, jax.random.key(0), "bfloat16")
    row = cached_step.measure(params, config, args, "xla", Ceilings(flops=1e12, bytes=1e11))
    assert (row["watts"], row["kv_cache_dtype"]) == (FRESH, keys)
    assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["step_ms"])


def test_a_chain_is_refused_where_there_is_none(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--shape", "llada-moe-7b", "--form", "chain"])
    assert "32 rows of llada-moe-7b make no chain; take layers or xla" in capsys.readouterr().err
