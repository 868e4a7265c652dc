"""The masked loss against NumPy, and against the objective that trained the bundled models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdllm
from jdllm import ConfigError, Transformer
from jdllm.demo.export import hf_config
from jdllm.demo.objective import dense_layout
from jdllm.demo.objective import masked_loss as demo_loss
from jdllm.losses import draw_masks, masked_loss
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from tests.models import numpy_transformer

BATCH, LENGTH = 6, 10
PROMPT = np.array([3, 1, 4, 5, 2, 2])
TOTAL = np.array([10, 6, 8, 10, 9, 7])
PLACE = np.arange(LENGTH)
REAL = TOTAL[:, None] > PLACE
RESPONSE = REAL & (PROMPT[:, None] <= PLACE)
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return config_from_hf(hf_config(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48))


@pytest.fixture(scope="module")
def model(config: ModelConfig) -> Transformer:
    params = Transformer(config, rngs=nnx.Rngs(0)).params()
    return Transformer(config, jax.tree.map(lambda leaf: jnp.where(leaf == 1, leaf, 5 * leaf), params))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(BATCH, LENGTH)).astype(np.int32)


def loss_of(model: Transformer, tokens: np.ndarray) -> float:
    return float(nnx.jit(masked_loss)(model, jnp.asarray(tokens), RESPONSE, KEY, padding_mask=REAL))


@pytest.mark.parametrize("shift", [False, True])
def test_against_numpy(model: Transformer, config: ModelConfig, tokens: np.ndarray, shift: bool):
    sequence = np.broadcast_to(np.arange(BATCH)[:, None], (BATCH, LENGTH))
    masked, ratio = map(np.asarray, draw_masks(KEY, jnp.asarray(RESPONSE), sequence, BATCH))
    assert masked.any()
    assert not (masked & ~RESPONSE).any()
    expected = []
    for row in range(BATCH):
        shown = np.where(masked[row], np.int32(config.mask_id or 0), tokens[row])[: TOTAL[row]]
        predicted = numpy_transformer.logits(model.params(), config, shown)
        nats = 0.0
        for place in np.flatnonzero(masked[row]):
            scores = predicted[place - shift]
            nats += np.log(np.exp(scores).sum()) - scores[tokens[row, place]]
        expected.append(nats / ratio[row] / RESPONSE[row].sum())
    shifted = Transformer(dataclasses.replace(config, logits_shift=shift), model.params())
    assert loss_of(shifted, tokens) == pytest.approx(np.mean(expected), rel=1e-4)


def test_it_is_the_objective_of_the_bundled_models(
    model: Transformer, config: ModelConfig, tokens: np.ndarray
):
    layout = dense_layout(((BATCH, LENGTH),))
    lengths = jnp.asarray(PROMPT), jnp.asarray(TOTAL)
    theirs = demo_loss(model.params(), config, layout, jnp.asarray(tokens.reshape(-1)), *lengths, KEY)
    assert loss_of(model, tokens) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention": "causal"}, "a llada model is causal"),
        ({"attention": "block_causal", "block_length": 4}, "a llada model is block_causal"),
        ({"mask_id": None}, "without mask_id has no mask token"),
    ],
)
def test_it_needs_a_model_that_fills_masks(
    model: Transformer, config: ModelConfig, tokens: np.ndarray, change: dict, said: str
):
    other = Transformer(dataclasses.replace(config, **change), model.params())
    with pytest.raises(ConfigError, match=said):
        masked_loss(other, jnp.asarray(tokens), jnp.asarray(RESPONSE), KEY)


def test_it_is_published():
    assert jdllm.losses.masked_loss is masked_loss
