"""Types and bytes of weights."""

import dataclasses

import jax.numpy as jnp
import pytest

from jdllm.models.config import ModelConfig, MoeConfig
from jdllm.models.leaf import dtypes_of
from jdllm.models.weights import abstract_params, layer_bytes, param_bytes
from tests.benchmarks.shapes import small


def test_types_are_those_of_matrices_and_of_hidden_rows():
    params = abstract_params(small("llada-8b"), "bfloat16")
    assert dtypes_of(params) == (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)
    kept_wide = params | {"final_norm": abstract_params(small("llada-8b"), "float32")["final_norm"]}
    assert dtypes_of(kept_wide) == (jnp.bfloat16, jnp.float32, jnp.float32)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_layers_and_what_is_outside_make_up_all_bytes(dtype: str, width: int):
    moe = MoeConfig(experts=4, top_k=2, expert_size=24, expert_bias=True, dense_layers=(1,))
    config: ModelConfig = dataclasses.replace(small("llada-moe-7b"), num_layers=3, moe=moe)
    outside = width * (2 * config.vocab_size + 1) * config.hidden_size
    layers = [layer_bytes(config, dtype, number) for number in range(3)]
    assert layers[0] == layers[2] != layers[1]
    assert sum(layers) + outside == param_bytes(config, dtype)
