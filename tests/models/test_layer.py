"""The parts of a layer that executions cut: groups of heads and chunks of rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.execution.transformer import Wanted, packed_ranges, ranges_of_wanted
from jdllm.models.block import Rows
from jdllm.models.cards import AXIS
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Group, Layer
from jdllm.models.weights import init_params
from tests.benchmarks.shapes import small
from tests.models.layer_by_layer import layers_in_order

ROWS = 12
close = np.testing.assert_allclose


def first_layer(config: ModelConfig) -> Layer:
    params = jax.tree.map(lambda x: 4 * x, init_params(config, jax.random.key(0), "float32"))
    return Layer(next(layers_in_order(params, config)), config)


def hidden(config: ModelConfig) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (ROWS, config.hidden_size))


def rows() -> Rows:
    return Rows(*(jnp.asarray(x) for x in (np.arange(ROWS), np.zeros(ROWS, int), np.full(ROWS, ROWS))))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llada-8b", "dream-7b", "llada-moe-7b"])
def test_groups_of_heads_make_up_all_heads(shape: str):
    config = small(shape)
    layer, h = first_layer(config), hidden(config)
    rotation, names = packed_ranges(config, rows()).rotation, ("k", "v", "q")
    whole = layer.project(h, rotation, names)
    groups = [layer.project(h, rotation, names, Group(i, 2)) for i in range(2)]
    for heads, parts in zip(whole, zip(*groups, strict=True), strict=True):
        close(jnp.concatenate(parts, axis=1), heads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ["dream-7b", pytest.param("llada-moe-7b", marks=pytest.mark.slow)])
def test_rows_that_are_wanted_get_what_all_rows_give_them(shape: str):
    config = small(shape)
    layer, h, sees = first_layer(config), hidden(config), packed_ranges(config, rows())
    all_rows, kept = layer.apply(h, sees)
    assert kept is None
    wanted = Wanted(jnp.array([7, 2]), jnp.ones(2, bool))
    k, v = layer.project(h, sees.rotation, ("k", "v"))
    some, _ = layer.apply(h[wanted.rows], ranges_of_wanted(sees, wanted, (k, v)))
    close(some, all_rows[wanted.rows], rtol=1e-5, atol=1e-5)


def test_cards_add_up_to_the_layer():
    """Each of two cards has half of the heads and of the inner width; NumPy has all, in float64."""
    config = small("llada-8b")
    weights = {name: np.asarray(x) for name, x in first_layer(config).weights.items()}
    h, o = np.random.default_rng(0).standard_normal((2, ROWS, config.hidden_size), np.float32)
    of_outputs = {name: np.stack(np.split(weights[name], 2, axis=0)) for name in ("gate", "up")}
    of_inputs = {name: np.stack(np.split(weights[name], 2, axis=1)) for name in ("o", "down")}
    parts = of_outputs | of_inputs | {"ffn_norm": np.stack([weights["ffn_norm"]] * 2)}
    on_card = dataclasses.replace(config, cards=2).on_card()

    def finished(weights: dict[str, jax.Array], o: jax.Array) -> jax.Array:
        return Layer(weights, on_card).finish(jnp.asarray(h), o)

    parts = jax.tree.map(jnp.asarray, parts)
    found = jax.vmap(finished, axis_name=AXIS)(parts, jnp.stack(jnp.split(o, 2, axis=1)))
    wide = {name: x.astype(np.float64) for name, x in weights.items()}
    after = h + o @ wide["o"].T
    x = after / np.sqrt((after**2).mean(-1, keepdims=True) + config.rms_norm_eps) * wide["ffn_norm"]
    gate = x @ wide["gate"].T
    expected = after + (gate / (1 + np.exp(-gate)) * (x @ wide["up"].T)) @ wide["down"].T
    for of_card in np.asarray(found):
        close(of_card, expected, rtol=1e-4, atol=1e-4)
