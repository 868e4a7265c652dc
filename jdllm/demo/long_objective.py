"""The training objective of the retrieval model: a row sees what the stages of Prefilling-dLLM let it see."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jdllm.demo.long_data import LongBucket
from jdllm.demo.objective import (
    all_logits,
    attend_example,
    attend_ranges,
    attention_of_parts,
    dense_layout,
)
from jdllm.demo.tokenizer import MASK
from jdllm.losses import draw_masks, weighted_loss
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params


def long_loss(
    params: Params,
    config: ModelConfig,
    buckets: tuple[LongBucket, ...],
    tokens: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    ends: Int[Array, " rows"],
    prompt_length: Int[Array, " examples"],
    total_length: Int[Array, " examples"],
    key: Array,
) -> Float[Array, ""]:
    """The LLaDA objective for answers, and the mean cross entropy of the tokens of a query that is scored.

    Arguments:
    - `params`: in the dtype to compute in.
    - `config`, `buckets`: static.
    - `tokens`, `positions`: int32, of every row of one step; rows of the response hold the ids to predict.
    - `ends`: int32; a row sees itself and the rows of its example before this one.
    - `prompt_length`, `total_length`: int32, the rows before the response, and the rows up to its end.
    - `key`: of the masks.

    Returns the mean over examples of the loss per response token, in nats; f32. See
    `jdllm.demo.objective.masked_loss`; rows that score are masked whatever is drawn.
    """
    shapes = tuple((bucket.batch, bucket.length) for bucket in buckets)
    layout = dense_layout(shapes)
    scoring = np.repeat([bucket.scoring for bucket in buckets], [bucket.batch for bucket in buckets])
    attends = [attend_ranges if bucket.scoring else attend_example for bucket in buckets]
    attention = attention_of_parts(list(zip(shapes, attends, strict=True)))
    example = layout.example
    place = jnp.asarray(layout.position)
    response = (place >= prompt_length[example]) & (place < total_length[example])
    masked, ratio = draw_masks(key, response, example, len(layout.start))
    masked = jnp.where(scoring[example], response, masked)
    ratio = jnp.where(scoring, 1.0, ratio)
    shown = jnp.where(masked, MASK, tokens)
    start = jnp.asarray(layout.start)[example]
    rows = Rows(positions, start, start + ends)
    predicted = all_logits(params, config, shown, rows, attention)
    weight = 1.0 / (ratio * (total_length - prompt_length))
    return weighted_loss(predicted, tokens, masked, weight[example]) / len(layout.start)
