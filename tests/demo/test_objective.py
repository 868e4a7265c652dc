import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.demo.export import hf_config
from jdllm.demo.objective import all_logits, denoise, dense_attention, dense_layout, masked_loss
from jdllm.demo.tokenizer import MASK
from jdllm.execution.transformer import forward, logits
from jdllm.losses import draw_masks
from jdllm.models.block import Rows
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params, init_params

CONFIG = config_from_hf(hf_config(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48))
SHAPES = ((3, 8), (2, 12))
PROMPT = np.array([3, 1, 4, 5, 2])
TOTAL = np.array([8, 6, 6, 12, 8])


@pytest.fixture(scope="module")
def params() -> Params:
    # Five times the usual scale, so that attention and predictions are far from uniform.
    return jax.tree.map(
        lambda p: jnp.where(p == 1, p, 5 * p), init_params(CONFIG, jax.random.key(0), "float32")
    )


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=3 * 8 + 2 * 12).astype(np.int32)


@jax.jit
def lone_forward(params: Params, tokens: jax.Array) -> jax.Array:
    count = len(tokens)
    rows = Rows(jnp.arange(count), jnp.zeros(count, jnp.int32), jnp.full(count, count, jnp.int32))
    return logits(params, CONFIG, forward(params, CONFIG, tokens, rows))


def packed_logits(params: Params, tokens: np.ndarray) -> np.ndarray:
    """Logits of one unpadded sequence by the transformer's own forward."""
    return np.asarray(lone_forward(params, jnp.asarray(tokens)))


def loss_of(params: Params, tokens: np.ndarray, key: jax.Array) -> jax.Array:
    lengths = jnp.asarray(PROMPT), jnp.asarray(TOTAL)
    return masked_loss(params, CONFIG, dense_layout(SHAPES), jnp.asarray(tokens), *lengths, key)


def test_logits_are_those_of_the_transformer_for_each_sequence_alone(params: Params, tokens: np.ndarray):
    layout = dense_layout(SHAPES)
    rows, attention = layout.rows(jnp.asarray(TOTAL)), dense_attention(SHAPES)
    ours = np.asarray(all_logits(params, CONFIG, jnp.asarray(tokens), rows, attention))
    for start, total in zip((0, 8, 16, 24, 36), TOTAL, strict=True):
        alone = packed_logits(params, tokens[start : start + total])
        np.testing.assert_allclose(ours[start : start + total], alone, rtol=1e-4, atol=1e-4)


def test_masks_stay_in_the_response_and_follow_the_ratio():
    layout = dense_layout(((500, 40),))
    response = jnp.asarray(layout.position >= 8)
    masked, ratio = draw_masks(jax.random.key(1), response, layout.example, len(layout.start))
    assert not np.any(masked & ~response)
    np.testing.assert_allclose(np.sort(ratio), 0.02 + 0.98 * (np.arange(500) + 0.5) / 500, atol=0.002)
    share = np.asarray(masked).reshape(500, 40)[:, 8:].mean(axis=1)
    assert np.abs(share - ratio).mean() < 0.08
    assert abs(float(np.mean(share - ratio))) < 0.01


def test_loss_is_the_weighted_cross_entropy_of_the_masked_tokens(params: Params, tokens: np.ndarray):
    layout, key = dense_layout(SHAPES), jax.random.key(2)
    loss = loss_of(params, tokens, key)
    response = (layout.position >= PROMPT[layout.example]) & (layout.position < TOTAL[layout.example])
    masked, ratio = map(np.asarray, draw_masks(key, jnp.asarray(response), layout.example, len(layout.start)))
    expected = 0.0
    for example, start in enumerate((0, 8, 16, 24, 36)):
        part = slice(start, start + TOTAL[example])
        shown = np.where(masked[part], MASK, tokens[part])
        scores = packed_logits(params, shown).astype(np.float64)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        nats = -scores[np.arange(len(shown)), tokens[part]][masked[part]].sum()
        expected += nats / ratio[example] / (TOTAL[example] - PROMPT[example]) / 5
    assert masked.sum() > 5
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


@pytest.mark.slow
def test_gradient_is_the_slope_of_the_loss(params: Params, tokens: np.ndarray):
    key = jax.random.key(3)
    loss = jax.jit(lambda p: loss_of(p, tokens, key))
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    drawn = [0.02 * jax.random.normal(k, p.shape) for k, p in zip(keys, leaves, strict=True)]
    direction = jax.tree.unflatten(treedef, drawn)
    ahead, behind = (
        float(loss(jax.tree.map(lambda p, d, s=s: p + s * d, params, direction))) for s in (0.01, -0.01)
    )
    products = jax.tree.map(lambda g, d: jnp.sum(g * d), jax.jit(jax.grad(loss))(params), direction)
    assert abs(ahead - behind) > 1e-3
    np.testing.assert_allclose(sum(jax.tree.leaves(products)), (ahead - behind) / 0.02, rtol=0.02)


def test_denoise_commits_the_most_confident_mask_first(params: Params, tokens: np.ndarray):
    batch = tokens[:24].reshape(3, 8).copy()
    for row, prompt, total in zip(batch, PROMPT, TOTAL, strict=False):
        row[prompt:total] = MASK
    ours = np.asarray(denoise(params, CONFIG, jnp.asarray(batch), jnp.asarray(TOTAL[:3]), 4))
    for row, total, got in zip(batch, TOTAL, ours, strict=False):
        state = row[:total].copy()
        for _ in range(4):
            scores = packed_logits(params, state)
            probability = np.exp(scores - scores.max(axis=1, keepdims=True))
            best = (probability / probability.sum(axis=1, keepdims=True)).max(axis=1)
            open_positions = np.flatnonzero(state == MASK)
            if len(open_positions):
                at = open_positions[np.argmax(best[open_positions])]
                state[at] = scores[at].argmax()
        np.testing.assert_array_equal(got[:total], state)
        np.testing.assert_array_equal(got[total:], row[total:])
