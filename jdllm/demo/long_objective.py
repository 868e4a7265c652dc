"""The training objective of the retrieval model: a row sees what the stages of Prefilling-dLLM let it see."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdllm.demo.objective import Layout, Shape, all_logits, attention_of_parts, draw_masks, weighted_loss
from jdllm.demo.tokenizer import MASK
from jdllm.models.block import AttentionFn, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params


def ranged_attention(shapes: tuple[Shape, ...]) -> AttentionFn:
    """Attention over packed rows that are dense parts of the given shapes; differentiable.

    A row sees itself and those of its own example before `k_end`. The softmax residuals of the contract are
    not computed: both are zero.
    """

    def attend(q: Array, k: Array, v: Array, ends: Int[Array, "examples length"], scale: float) -> Array:
        key = jnp.arange(ends.shape[1])
        seen = (key < ends[:, None, :, None]) | (key == key[:, None])
        return jax.nn.dot_product_attention(q, k, v, mask=seen, scale=scale)

    return attention_of_parts(shapes, attend)


def long_loss(
    params: Params,
    config: ModelConfig,
    layout: Layout,
    tokens: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    ends: Int[Array, " rows"],
    prompt_length: Int[Array, " examples"],
    total_length: Int[Array, " examples"],
    scoring: Bool[Array, " examples"],
    key: Array,
) -> Float[Array, ""]:
    """The LLaDA objective for answers, and the mean cross entropy of the tokens of a query that is scored.

    Arguments:
    - `params`: in the dtype to compute in.
    - `config`, `layout`: static.
    - `tokens` to `scoring`: as in `jdllm.demo.long_data.LongBatches`, of one step; numbers int32.
    - `key`: of the masks.

    Returns the mean over examples of the loss per response token, in nats; f32. See
    `jdllm.demo.objective.masked_loss`; rows that score are masked whatever is drawn.
    """
    example = layout.example
    place = jnp.asarray(layout.position)
    response = (place >= prompt_length[example]) & (place < total_length[example])
    masked, ratio = draw_masks(key, layout, response)
    masked = jnp.where(scoring[example], response, masked)
    ratio = jnp.where(scoring, 1.0, ratio)
    shown = jnp.where(masked, MASK, tokens)
    start = jnp.asarray(layout.start)[example]
    rows = Rows(positions, start, start + ends)
    predicted = all_logits(params, config, shown, rows, ranged_attention(layout.shapes))
    weight = 1.0 / (ratio * (total_length - prompt_length))
    return weighted_loss(predicted, tokens, masked, weight[example]) / len(layout.start)
