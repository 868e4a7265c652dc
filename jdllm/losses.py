"""Training losses for the Flax module `jdllm.Transformer`.

The objective is LLaDA's (section 2.3 of Nie et al. 2025, arXiv 2502.09992): mask each response token
with a random probability, and predict the masked tokens.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.errors import ConfigError

if TYPE_CHECKING:
    from jdllm.execution.module import Transformer

LOWEST_RATIO = 0.02
"""The least mask probability: it bounds the weight of a token, 1 / probability."""


def masked_loss(
    model: "Transformer",
    tokens: Int[Tensor, "batch length"],
    response: Bool[Tensor, "batch length"],
    key: Array,
    *,
    padding_mask: Bool[Tensor, "batch length"] | None = None,
) -> Float[Array, ""]:
    """The LLaDA objective of a batch, in nats for each response token.

    Arguments:
    - `model`: a diffusion model. The logits of a model like Dream, whose row j predicts token j + 1, are
      shifted.
    - `tokens`: ids of prompts and responses.
    - `response`: true for response tokens, of which every sequence has one or more.
    - `key`: of the masks.
    - `padding_mask`: false for tokens that are not there.

    Returns the mean over sequences of: the sum of the masked tokens' cross entropies, divided by the mask
    probability and by the count of response tokens. f32.

    Raises `ConfigError` for a model whose tokens do not all see each other, and for one without a mask token.
    """
    config = model.config
    if config.attention != "full" or config.mask_id is None:
        kind = "without mask_id has no mask token" if config.attention == "full" else f"is {config.attention}"
        raise ConfigError(
            "the masked loss is for diffusion models whose tokens all see each other:"
            f" a {config.family} model {kind}"
        )
    sequence = np.broadcast_to(np.arange(len(tokens))[:, None], tokens.shape)
    masked, ratio = draw_masks(key, response, sequence, len(tokens))
    predicted = model(jnp.where(masked, config.mask_id, tokens), padding_mask=padding_mask)
    if config.logits_shift:
        predicted = jnp.concatenate([predicted[:, :1], predicted[:, :-1]], axis=1)
    weight = 1.0 / (ratio * response.sum(axis=1))
    return weighted_loss(predicted, tokens, masked, weight[:, None]) / len(tokens)


def draw_masks(
    key: Array, response: Bool[Tensor, "*rows"], sequence: Int[np.ndarray, "*rows"], sequences: int
) -> tuple[Bool[Array, "*rows"], Float[Array, " sequences"]]:
    """Mask each response token with the probability of its sequence.

    Arguments:
    - `key`: of the draws.
    - `response`: tokens that may be masked.
    - `sequence`: the sequence of each token, counted from 0.
    - `sequences`: how many there are.

    Returns the masked tokens, and each sequence's probability, which is uniform over (0.02, 1) and stratified
    over the sequences.
    """
    ratio_key, mask_key = jax.random.split(key)
    # A stride coprime to the count spreads the strata over sequences that are drawn in order of their length.
    first = int(sequences * 0.618) + 1
    stride = next(s for s in range(first, 2 * sequences + 2) if np.gcd(s, sequences) == 1)
    strata = jnp.asarray(np.arange(sequences) * stride % sequences / sequences, jnp.float32)
    uniform = (strata + jax.random.uniform(ratio_key)) % 1.0
    ratio = LOWEST_RATIO + (1 - LOWEST_RATIO) * uniform
    return (jax.random.uniform(mask_key, response.shape) < ratio[sequence]) & response, ratio


def weighted_loss(
    predicted: Float[Array, "*rows vocab"],
    tokens: Int[Tensor, "*rows"],
    masked: Bool[Array, "*rows"],
    weight: Float[Array, "*#rows"],
) -> Float[Array, ""]:
    """The sum of the masked tokens' cross entropies, in nats, each times its weight."""
    right = jnp.take_along_axis(predicted, tokens[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(predicted, axis=-1) - right
    return jnp.sum(jnp.where(masked, nats * weight, 0.0))
