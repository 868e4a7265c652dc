"""The spec tree: names, sizes, bytes and initialisation."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import (
    Params,
    TensorSpec,
    abstract_params,
    head_weights,
    init_params,
    is_spec,
    param_bytes,
    spec_tree,
    stored_specs,
)
from tests.conftest import LLADA
from tests.helpers import Golden


def specs_of(config: ModelConfig) -> list[TensorSpec]:
    return jax.tree.leaves(spec_tree(config), is_leaf=is_spec)


def test_sources_are_exactly_the_tensors_of_the_checkpoint(config: ModelConfig):
    stored = {name: tensor.shape for name, tensor in LLADA.tensors("model").items()}
    named = [(name, spec.source_shape) for spec in specs_of(config) for name, _ in spec.sources()]
    assert len(named) == len(dict(named))
    assert dict(named) == stored


def test_leaves_with_one_source_are_its_rows():
    config = config_from_hf(Golden("llada2").directory)
    stored = {name: tensor.shape for name, tensor in Golden("llada2").tensors("model").items()}
    layers = spec_tree(config)["layers"]
    assert isinstance(layers, dict)
    assert [(layers[name].first_row, layers[name].shape[1]) for name in "qkv"] == [
        (0, 64),
        (64, 32),
        (96, 32),
    ]
    assert {name: spec.source_shape for spec in specs_of(config) for name, _ in spec.sources()} == stored
    whole = [
        (name, spec.source_shape) for spec in stored_specs(config).values() for name, _ in spec.sources()
    ]
    assert len(whole) == len(stored)
    assert dict(whole) == stored


def test_stacked_leaves_hold_one_source_for_each_layer(config: ModelConfig):
    q = spec_tree(config)["layers"]["q"]  # pyright: ignore[reportIndexIssue]
    assert q.shape == (2, 64, 64)
    assert q.axes == ("layers", "heads", "hidden")
    assert [(name.split(".")[3], at) for name, at in q.sources()] == [("0", (0,)), ("1", (1,))]


def test_axes_name_every_dimension(config: ModelConfig):
    sizes: dict[str, set[int]] = {}
    for spec in specs_of(config):
        assert len(spec.axes) == len(spec.shape)
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            sizes.setdefault(axis, set()).add(size)
    assert sizes == {
        "vocab": {512}, "hidden": {64}, "layers": {2}, "heads": {64}, "kv_heads": {64}, "ffn": {160},
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_are_those_of_the_checkpoint(config: ModelConfig, dtype: str, width: int):
    elements = sum(tensor.size for tensor in LLADA.tensors("model").values())
    assert param_bytes(config, dtype) == elements * width
    leaves = jax.tree.leaves(abstract_params(config, dtype))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == elements * width


def test_a_tied_head_has_no_tensor(config: ModelConfig):
    tied = dataclasses.replace(config, tied_head=True)
    assert "head" not in spec_tree(tied)
    params = abstract_params(tied, "float32")
    assert head_weights(params) is params["embed"]
    untied = abstract_params(config, "float32")
    assert head_weights(untied) is untied["head"]


@pytest.fixture(scope="module")
def drawn(config: ModelConfig) -> Params:
    return jax.jit(init_params, static_argnums=(0, 2))(config, jax.random.key(0), "float32")


def test_initial_scales(drawn: Params):
    flat = {name: np.asarray(leaf) for name, leaf in drawn["layers"].items()} | {
        name: np.asarray(drawn[name]) for name in ("embed", "head", "final_norm")
    }
    for name, leaf in flat.items():
        if name.endswith("norm"):
            assert (leaf == 1).all()
            continue
        expected = 0.02 / math.sqrt(4) if name in ("o", "down") else 0.02
        # the sample deviation of n normal draws is off by a factor of about 1 / sqrt(2 n)
        assert leaf.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * leaf.size)), name
        assert abs(leaf.mean()) < 5 * expected / math.sqrt(leaf.size), name


def test_layers_and_leaves_are_drawn_apart(drawn: Params):
    layers = drawn["layers"]
    assert (np.asarray(layers["q"][0]) != np.asarray(layers["q"][1])).all()
    assert (np.asarray(layers["q"]) != np.asarray(layers["k"])).all()
