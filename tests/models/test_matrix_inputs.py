"""What each matrix of a layer multiplies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.models.block import Rows
from jdllm.models.hf_config import config_from_hf
from jdllm.models.layer import Layer, Ranges
from jdllm.models.rotary import rotation_at
from jdllm.models.visibility import key_ranges
from jdllm.pallas.attention import attention
from tests.helpers import GOLDENS


@pytest.mark.parametrize("family", ["llama", "qwen2", "llada"])
def test_products_with_these_rows_are_what_the_layer_computes(family: str):
    config = config_from_hf(GOLDENS / family)
    params = load_params(GOLDENS / family, config, "float32")
    weights = jax.tree.map(lambda leaf: leaf[1], params["layers"])
    layer = Layer(weights, config)
    h = jnp.asarray(np.random.default_rng(0).normal(size=(24, config.hidden_size)), jnp.float32)
    rows = Rows(np.arange(24), *key_ranges(config, 0, 24))
    sees = Ranges(rows, rotation_at(config.rope, config.head_dim, rows.positions), attention)
    inputs = layer.matrix_inputs(h, sees)
    assert inputs.keys() == {"q", "k", "v", "o", "gate", "up", "down"}
    products = {name: np.asarray(x) @ np.asarray(weights[name]).T for name, x in inputs.items()}

    for name in ("q", "k", "v"):
        (expected,) = layer.project_unrotated(h, (name,))
        found = products[name] + np.asarray(weights.get(f"{name}_bias", 0))
        np.testing.assert_allclose(found, expected.reshape(24, -1), rtol=1e-4, atol=1e-4)
    gate = products["gate"]
    np.testing.assert_allclose(
        inputs["down"], gate / (1 + np.exp(-gate)) * products["up"], rtol=1e-4, atol=1e-4
    )
    after = np.asarray(h) + products["o"] + products["down"]
    np.testing.assert_allclose(after, layer.apply(h, sees)[0], rtol=1e-4, atol=1e-4)
