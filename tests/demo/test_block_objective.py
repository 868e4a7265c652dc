"""The objective of block diffusion, beside the transformer on every block alone behind its clean prefix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.demo.block_objective import block_loss, noisy_rows
from jdllm.demo.data import Batches, Bucket, make_batches
from jdllm.demo.export import block_hf_config
from jdllm.demo.objective import denoise
from jdllm.demo.tokenizer import MASK
from jdllm.demo.train import TrainSettings, TrainState, make_optimizer, train_steps
from jdllm.execution.transformer import forward, logits
from jdllm.losses import draw_masks
from jdllm.models.block import Rows
from jdllm.models.hf_config import config_from_hf
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params, init_params

BLOCK = 8
CONFIG = config_from_hf(
    block_hf_config(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=48,
        max_positions=128,
        block_length=BLOCK,
    )
)
SHAPES = ((2, 48), (2, 64))
PROMPT = np.array([5, 16, 23, 31])
TOTAL = np.array([37, 40, 31, 63])


@jax.jit
def lone_logits(params: Params, tokens: jax.Array, rows: Rows) -> jax.Array:
    return logits(params, CONFIG, forward(params, CONFIG, tokens, rows))


def nats(params: Params, tokens: np.ndarray) -> np.ndarray:
    """Cross entropies `[rows, vocab]` of one sequence of whole blocks, by the transformer's own forward."""
    rows = Rows(jnp.arange(len(tokens)), *map(jnp.asarray, key_ranges(CONFIG, 0, len(tokens))))
    found = np.asarray(lone_logits(params, jnp.asarray(tokens), rows), np.float64)
    found -= found.max(axis=1, keepdims=True)
    return np.log(np.exp(found).sum(axis=1, keepdims=True)) - found


@pytest.fixture(scope="module")
def params() -> Params:
    # Five times the usual scale, so that attention and predictions are far from uniform.
    return jax.tree.map(
        lambda p: jnp.where(p == 1, p, 5 * p), init_params(CONFIG, jax.random.key(0), "float32")
    )


def test_the_loss_is_that_of_every_block_alone_behind_its_clean_prefix(params: Params):
    tokens = np.random.default_rng(0).integers(256, size=2 * 48 + 2 * 64).astype(np.int32)
    key = jax.random.key(2)
    given = jnp.asarray(tokens), jnp.asarray(PROMPT), jnp.asarray(TOTAL)
    loss = jax.jit(lambda *arrays: block_loss(params, CONFIG, SHAPES, *arrays, key=key))(*given)

    # The masks lie behind the clean rows of each example: five blocks of a response that begins in the first.
    lengths = np.array([48, 48, 64, 64])
    response, block = [], []
    for example, (prompt, total, length) in enumerate(zip(PROMPT, TOTAL, lengths, strict=True)):
        place = prompt // BLOCK * BLOCK + np.arange(5 * BLOCK)
        response += [np.zeros(length, bool), (place >= prompt) & (place < -(-total // BLOCK) * BLOCK)]
        block += [np.zeros(length, int), 5 * example + np.arange(5 * BLOCK) // BLOCK]
    drawn = draw_masks(key, jnp.asarray(np.concatenate(response)), np.concatenate(block), 20)
    masked, ratio = map(np.asarray, drawn)

    expected, blocks = 0.0, 0
    own_start = np.cumsum(lengths) - lengths
    row = 0
    for example, (prompt, total, length) in enumerate(zip(PROMPT, TOTAL, lengths, strict=True)):
        own = tokens[own_start[example] :][:length]
        end = -(-total // BLOCK) * BLOCK
        row += length
        for number, first in enumerate(range(prompt // BLOCK * BLOCK, end, BLOCK)):
            hidden = masked[row + number * BLOCK :][:BLOCK]
            shown = own[: first + BLOCK].copy()
            shown[first:][hidden] = MASK
            lost = nats(params, shown)[np.arange(len(shown)), own[: first + BLOCK]][first:][hidden].sum()
            expected += lost / ratio[5 * example + number] / (end - prompt) / 4
            blocks += bool(hidden.any())
        row += 5 * BLOCK
    assert row == len(masked)
    assert blocks > 10
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_denoise_commits_the_most_confident_mask_of_the_first_open_block(params: Params):
    """After 12 steps one sequence of three is filled, and the others end inside a block.

    Each has a prompt: in a sequence of masks all rows are alike, and rounding would choose among them.
    """
    tokens = np.random.default_rng(1).integers(256, size=(3, 32)).astype(np.int32)
    prompt, total = (11, 8, 3), (16, 32, 24)
    for row, first, end in zip(tokens, prompt, total, strict=True):
        row[first:end] = MASK
    ours = np.asarray(denoise(params, CONFIG, jnp.asarray(tokens), jnp.asarray(total), 12))
    for row, end, got in zip(tokens, total, ours, strict=True):
        state = row[:end].copy()
        for _ in range(min(12, (state == MASK).sum())):
            stop = (np.flatnonzero(state == MASK)[0] // BLOCK + 1) * BLOCK
            lost = nats(params, state[:stop])
            chosen, least = lost.argmin(axis=1), lost.min(axis=1)
            at = np.where(state[:stop] == MASK, least, np.inf).argmin()
            state[at] = chosen[at]
        np.testing.assert_array_equal(got[:end], state)
        np.testing.assert_array_equal(got[end:], row[end:])
    assert [(row == MASK).sum() for row in ours] == [0, 12, 9]


def test_steps_on_one_batch_lower_its_loss():
    bucket = Bucket(48, 8, (("addition", 1.0),))
    settings = TrainSettings(
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=48,
        block_length=BLOCK,
        buckets=(bucket,),
        dtype="float32",
        learning_rate=1e-2,
    )
    config = config_from_hf(settings.hf_config())
    params = init_params(config, jax.random.key(0), "float32")
    state = TrainState(params, make_optimizer(config, 0.0).init(params), jax.random.key(1))
    one = make_batches((bucket,), steps=1, seed=0, index=0)
    batches = Batches(*(np.repeat(x, 20, axis=0) for x in one))
    losses = []
    for _ in range(3):
        state, loss = train_steps(state, batches, np.float32(0.03), config, settings)
        losses.append(float(loss))
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.5 * losses[0]


@pytest.mark.parametrize(("block_length", "rows"), [(1, 32), (4, 36), (8, 40), (16, 48), (32, 64)])
def test_noisy_rows_are_all_blocks_that_a_response_of_32_tokens_can_reach(block_length: int, rows: int):
    reached = {-(-(start + 32) // block_length) * block_length for start in range(block_length)}
    assert max(reached) == noisy_rows(block_length) == rows
