"""The training objective of block diffusion: all blocks of a response in one evaluation."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jdllm.demo.objective import Shape, all_logits, attend_ranges, attention_of_parts, dense_layout
from jdllm.demo.tasks import GEN_LENGTH
from jdllm.demo.tokenizer import MASK
from jdllm.losses import draw_masks, weighted_loss
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params


def noisy_rows(block_length: int) -> int:
    """Rows of all blocks that a response of `GEN_LENGTH` tokens, begun anywhere in a block, can reach."""
    return (-(-(GEN_LENGTH - 1) // block_length) + 1) * block_length


def block_loss(
    params: Params,
    config: ModelConfig,
    shapes: tuple[Shape, ...],
    tokens: Int[Array, " rows"],
    prompt_length: Int[Array, " examples"],
    total_length: Int[Array, " examples"],
    key: Array,
) -> Float[Array, ""]:
    """The objective of block diffusion: cross entropy of masked tokens, weighted by 1 / mask probability.

    Each example is evaluated with its clean rows and, behind these, a second copy of the blocks of its
    response, in which tokens are masked. A clean row sees its block and all before it. A noisy row sees its
    noisy block, and the clean blocks before that. So every block is predicted as a sampler meets it. The
    response goes on to the end of its last block, because samplers fill whole blocks.

    Arguments:
    - `params`: in the dtype to compute in.
    - `config`: of a block-causal model; static.
    - `shapes`: examples, and tokens of each, of the parts of `tokens`; the tokens are whole blocks. Static.
    - `tokens`: int32 ids of every position of one step, the response included.
    - `prompt_length`, `total_length`: int32, the tokens before the response, and the tokens up to its end, at
      most `GEN_LENGTH` more.
    - `key`: of the masks.

    Returns the mean over examples of the loss per response token, in nats; f32. Each block has a mask
    probability of its own. Source: section 3 of Arriola et al. 2025 (arXiv 2503.09573), with the linear
    schedule.
    """
    block_length = config.block_length
    assert block_length is not None
    noisy_length = noisy_rows(block_length)
    clean, layout = dense_layout(shapes), dense_layout(tuple((n, t + noisy_length) for n, t in shapes))
    example, start = layout.example, jnp.asarray(layout.start)[layout.example]
    clean_length = np.repeat([length for _, length in shapes], [count for count, _ in shapes])[example]
    noisy = layout.position >= clean_length
    behind = layout.position - clean_length

    first = (prompt_length // block_length * block_length)[example]
    position = jnp.where(noisy, first + behind, layout.position)
    block_start = position // block_length * block_length
    rows = Rows(position, start, start + block_start + np.where(noisy, 0, block_length))

    end = -(-total_length // block_length) * block_length
    response = noisy & (position >= prompt_length[example]) & (position < end[example])
    blocks = noisy_length // block_length
    block = example * blocks + np.maximum(behind, 0) // block_length
    masked, ratio = draw_masks(key, response, block, len(layout.start) * blocks)

    target = tokens[clean.start[example] + jnp.minimum(position, clean_length - 1)]
    attention = attention_of_parts(
        [
            ((count, length + noisy_length), functools.partial(attend_ranges, group=_groups(length, config)))
            for count, length in shapes
        ]
    )
    predicted = all_logits(params, config, jnp.where(masked, MASK, target), rows, attention)
    weight = 1.0 / (ratio[block] * (end - prompt_length)[example])
    return weighted_loss(predicted, target, masked, weight) / len(layout.start)


def _groups(length: int, config: ModelConfig) -> Int[np.ndarray, " rows"]:
    """The first row of each row's noisy block; `length` clean rows come before, each for itself."""
    assert config.block_length is not None
    noisy = np.arange(noisy_rows(config.block_length))
    return np.concatenate([np.arange(length), length + noisy // config.block_length * config.block_length])
