"""The objective of the retrieval model, beside the transformer on every sequence alone."""

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.demo.export import hf_config
from jdllm.demo.long_data import LongBatches, LongBucket, make_long_batches
from jdllm.demo.long_objective import long_loss
from jdllm.demo.objective import dense_layout
from jdllm.demo.tokenizer import MASK
from jdllm.execution.transformer import forward, logits
from jdllm.losses import draw_masks
from jdllm.models.block import Rows
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import Params, init_params

CONFIG = config_from_hf(hf_config(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48))
BUCKETS = LongBucket(256, 2, scoring=True), LongBucket(192, 2, scoring=False)


LONGEST = 256


@jax.jit
def lone_logits(params: Params, tokens: jax.Array, positions: jax.Array, ends: jax.Array) -> jax.Array:
    rows = Rows(positions, jnp.zeros_like(ends), ends)
    return logits(params, CONFIG, forward(params, CONFIG, tokens, rows))


def nats(params: Params, tokens: np.ndarray, positions: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Cross entropies `[rows, vocab]` of one sequence."""
    columns = (np.pad(x, (0, LONGEST - len(x))) for x in (tokens, positions, ends))
    found = np.asarray(lone_logits(params, *map(jnp.asarray, columns)), np.float64)[: len(tokens)]
    found -= found.max(axis=1, keepdims=True)
    return np.log(np.exp(found).sum(axis=1, keepdims=True)) - found


def test_the_loss_is_that_of_every_sequence_alone():
    # Five times the usual scale, so that attention and predictions are far from uniform.
    params = jax.tree.map(
        lambda p: jnp.where(p == 1, p, 5 * p), init_params(CONFIG, jax.random.key(0), "float32")
    )
    layout = dense_layout(tuple((bucket.batch, bucket.length) for bucket in BUCKETS))
    drawn = LongBatches(*(x[0] for x in make_long_batches(BUCKETS, 1, seed=0, index=0)))
    batch = LongBatches(*(np.asarray(x, np.int32) for x in drawn))
    tokens, positions, ends, prompt_length, total_length = batch
    scoring = [True, True, False, False]
    key = jax.random.key(2)
    arrays = jax.tree.map(jnp.asarray, batch._asdict())
    loss = jax.jit(lambda arrays: long_loss(params, CONFIG, BUCKETS, **arrays, key=key))(arrays)
    place = layout.position
    response = (place >= prompt_length[layout.example]) & (place < total_length[layout.example])
    hidden, ratio = map(np.asarray, draw_masks(key, jnp.asarray(response), layout.example, len(layout.start)))
    expected = 0.0
    for example, start in enumerate(layout.start.tolist()):
        before, total = prompt_length[example], total_length[example]
        part = slice(start, start + total)
        own, at = tokens[part], positions[part]
        if scoring[example]:
            # Each token by itself: a mask behind what is before it.
            for row in range(before, total):
                seen = ends[start + row]
                alone = np.append(own[:seen], MASK)
                sees = np.append(ends[start : start + seen], seen + 1)
                found = nats(params, alone, np.append(at[:seen], at[row]), sees)
                expected += found[-1, own[row]] / (total - before)
        else:
            masked = hidden[part]
            found = nats(params, np.where(masked, MASK, own), at, np.full(total, total))
            lost = found[np.arange(total), own][masked].sum()
            expected += lost / ratio[example] / (total - before)
    np.testing.assert_allclose(loss, expected / 4, rtol=1e-4)
