"""The Flax module on a card: logits and gradients of a model in bfloat16 beside the same in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.shapes import SHAPES
from jdllm import Transformer, losses
from jdllm.models.config import ModelConfig

pytestmark = pytest.mark.gpu

TOKENS = np.random.default_rng(0).integers(0, 60_000, (2, 256))
REAL = np.arange(256) < np.array([[256], [201]])
KEY = jax.random.key(0)


@pytest.fixture(scope="module", params=["llada-8b", "llada-moe-7b"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return dataclasses.replace(SHAPES[request.param], num_layers=2)


def cosine(a: jax.Array, b: jax.Array) -> float:
    first, second = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def test_bfloat16_goes_where_float32_goes(config: ModelConfig):
    full = Transformer(config, rngs=nnx.Rngs(0), dtype="float32")
    half = Transformer(config, jax.tree.map(lambda x: x.astype("bfloat16"), full.params()))

    @nnx.jit
    def logits(model: Transformer) -> jax.Array:
        return model(jnp.asarray(TOKENS), padding_mask=REAL)

    @nnx.jit
    def grads(model: Transformer) -> nnx.State:
        def loss(model: Transformer) -> jax.Array:
            return losses.masked_loss(model, jnp.asarray(TOKENS), REAL, KEY, padding_mask=REAL)

        return nnx.grad(loss)(model)

    assert cosine(logits(half)[REAL], logits(full)[REAL]) > 0.999
    pairs = zip(jax.tree.leaves(grads(half)), jax.tree.leaves(grads(full)), strict=True)
    assert min(cosine(a, b) for a, b in pairs) > 0.98
