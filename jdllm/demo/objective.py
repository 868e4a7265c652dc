"""The LLaDA training objective on packed rows, with an attention that has a gradient."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jdllm.demo.tokenizer import MASK
from jdllm.execution.transformer import apply_layers, logits
from jdllm.losses import draw_masks, weighted_loss
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import AttentionFn
from jdllm.models.leaf import dtypes_of
from jdllm.models.visibility import seen_range
from jdllm.models.weights import Params
from jdllm.pallas.device import target

type Shape = tuple[int, int]
"""(examples, tokens of each) of one dense part of the packed rows."""


class Layout(NamedTuple):
    """Where the rows of dense parts lie in the packed rows. All arrays are static.

    - `shapes`: the parts, one after another.
    - `example`: example that each row belongs to, counted over all parts.
    - `position`: position of each row in its example.
    - `start`: first row of each example.
    """

    shapes: tuple[Shape, ...]
    example: Int[np.ndarray, " rows"]
    position: Int[np.ndarray, " rows"]
    start: Int[np.ndarray, " examples"]

    def rows(self, total_length: Int[Array, " examples"]) -> Rows:
        """Positions and key ranges: each row sees its own example up to `total_length`."""
        start = self.start[self.example]
        return Rows(jnp.asarray(self.position), jnp.asarray(start), start + total_length[self.example])


def dense_layout(shapes: tuple[Shape, ...]) -> Layout:
    """The layout of dense parts of the given shapes."""
    lengths = np.concatenate([np.full(count, length) for count, length in shapes])
    start = np.cumsum(lengths) - lengths
    example = np.repeat(np.arange(len(lengths)), lengths)
    return Layout(shapes, example, np.arange(len(example)) - start[example], start)


def dense_attention(shapes: tuple[Shape, ...]) -> AttentionFn:
    """Attention over packed rows that are dense parts of the given shapes; differentiable.

    `Layout.rows` must have made the key ranges. The softmax residuals of the contract are not computed:
    both are zero.
    """

    return attention_of_parts([(shape, attend_example) for shape in shapes])


def attend_example(
    q: Array, k: Array, v: Array, ends: Int[Array, "examples length"], scale: float
) -> Float[Array, "examples length heads d"]:
    """Every row sees as much of its example as the first one; see `attention_of_parts`.

    On a card, rows of 16 bits go through cuDNN, which keeps no probabilities for the gradient.
    """
    fused = target().on_cuda and q.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        key_value_seq_lengths=ends[:, 0],
        implementation="cudnn" if fused else "xla",
    )


def attend_ranges(
    q: Array,
    k: Array,
    v: Array,
    ends: Int[Array, "examples length"],
    scale: float,
    *,
    group: Int[np.ndarray, " length"] | None = None,
) -> Float[Array, "examples length heads d"]:
    """A row sees the rows of its example before its own end, and its group; without groups, itself."""
    key = np.arange(ends.shape[1])
    group = key if group is None else group
    seen = (key < ends[:, None, :, None]) | (group == group[:, None])
    return jax.nn.dot_product_attention(q, k, v, mask=seen, scale=scale)


def attention_of_parts(parts: Sequence[tuple[Shape, Callable[..., Array]]]) -> AttentionFn:
    """Attention over packed rows that are dense parts, one after another.

    Arguments:
    - `parts`: their shapes, and what attends in each: from queries, keys and values
      `[examples, length, heads, d]`, how many rows of its example each row sees, and the scale.

    The softmax residuals of the contract are not computed: both are zero.
    """

    def attention(
        q: Float[Array, "rows heads d"],
        k: Float[Array, "rows kv_heads d"],
        v: Float[Array, "rows kv_heads d"],
        k_start: Int[Array, " rows"],
        k_end: Int[Array, " rows"],
        *,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        bounds = itertools.accumulate((count * length for (count, length), _ in parts), initial=0)
        outputs = []
        for ((count, length), attend), (first, last) in zip(parts, itertools.pairwise(bounds), strict=True):
            dense = [x[first:last].reshape(count, length, *x.shape[1:]) for x in (q, k, v)]
            o = attend(*dense, (k_end - k_start)[first:last].reshape(count, length), scale)
            outputs.append(o.reshape(count * length, *q.shape[1:]))
        nothing = jnp.zeros(q.shape[:2])
        return jnp.concatenate(outputs), nothing, nothing

    return attention


def finished(
    config: ModelConfig, layout: Layout, total_length: Int[Array, " examples"]
) -> tuple[Rows, AttentionFn]:
    """What the rows of finished sequences see, and the attention that lets them.

    Arguments:
    - `config`, `layout`: static.
    - `total_length`: int32, the rows of each example that are no padding.
    """
    rows = layout.rows(total_length)
    seen = seen_range(config, jnp.asarray(layout.position), total_length[layout.example])
    if seen is None:
        return rows, dense_attention(layout.shapes)
    parts = [(shape, attend_ranges) for shape in layout.shapes]
    return rows._replace(k_end=rows.k_start + seen[1]), attention_of_parts(parts)


def all_logits(
    params: Params, config: ModelConfig, tokens: Int[Array, " rows"], rows: Rows, attention: AttentionFn
) -> Float[Array, "rows vocab"]:
    """f32 logits of every row, with an attention that has a gradient.

    The layers are the transformer's own. The embedding is a product with one-hot rows instead of a lookup,
    because the gradient of a lookup adds up all rows of one token in the dtype of the weights.
    """
    one_hot = jax.nn.one_hot(tokens, config.vocab_size, dtype=dtypes_of(params).weights)
    h = one_hot @ params["embed"]
    return logits(params, config, apply_layers(params, config, h, rows, attention=attention))


def masked_loss(
    params: Params,
    config: ModelConfig,
    layout: Layout,
    tokens: Int[Array, " rows"],
    prompt_length: Int[Array, " examples"],
    total_length: Int[Array, " examples"],
    key: Array,
) -> Float[Array, ""]:
    """The LLaDA objective: cross entropy of masked response tokens, weighted by 1 / mask probability.

    Arguments:
    - `params`: in the dtype to compute in.
    - `config`, `layout`: static.
    - `tokens`: int32 ids of every position of one step, the response included.
    - `prompt_length`, `total_length`: int32, the tokens before the response, and the tokens up to its end.
    - `key`: of the masks.

    Returns the mean over examples of the loss per response token, in nats; f32. Source: section 2.3 of
    Nie et al. 2025 (arXiv 2502.09992).
    """
    example = layout.example
    position = jnp.asarray(layout.position)
    response = (position >= prompt_length[example]) & (position < total_length[example])
    masked, ratio = draw_masks(key, response, example, len(layout.start))
    shown = jnp.where(masked, MASK, tokens)
    predicted = all_logits(params, config, shown, layout.rows(total_length), dense_attention(layout.shapes))
    weight = 1.0 / (ratio * (total_length - prompt_length))
    return weighted_loss(predicted, tokens, masked, weight[example]) / len(layout.start)


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def denoise(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "batch length"],
    total_length: Int[Array, " batch"],
    steps: int,
) -> Int[Array, "batch length"]:
    """Fill the mask tokens, the most confident one per forward evaluation; of a block model block by block.

    Arguments:
    - `params`: weights in the dtype to compute in.
    - `config`: static.
    - `tokens`: prompts and masks; padding after `total_length`.
    - `total_length`: tokens up to the end of the response.
    - `steps`: forward evaluations; static.

    Returns the tokens after `steps` evaluations: LLaDA's sampler with low-confidence remasking in one block
    at temperature 0, without its options; of a block model SDAR's, with as many steps as positions.
    """
    layout = dense_layout(((tokens.shape[0], tokens.shape[1]),))
    rows, attention = finished(config, layout, total_length)
    position = jnp.arange(tokens.shape[1])
    block = position // (config.block_length or tokens.shape[1])

    def step(_: Any, state: Array) -> Array:
        predicted = all_logits(params, config, state.reshape(-1), rows, attention)
        best = jnp.max(predicted, axis=1) - jax.nn.logsumexp(predicted, axis=1)
        masked = state == MASK
        may = masked & (block == block[jnp.argmax(masked, axis=1)][:, None])
        at = jnp.argmax(jnp.where(may, best.reshape(state.shape), -jnp.inf), axis=1)
        chosen = jnp.argmax(predicted, axis=1).reshape(state.shape)
        return jnp.where((position == at[:, None]) & may, chosen, state)

    return lax.fori_loop(0, steps, step, tokens)
