"""The contract of masked logits."""

import enum
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt32

from jdllm.arrays import Tensor

Ids = Int[Tensor, "rows bans"]
Keys = tuple[UInt32[Array, " rows"], UInt32[Array, " rows"]]


class Level(enum.IntEnum):
    """How much is computed of each row's distribution; each level includes those before it.

    - `TOP`: what the token's own probability needs.
    - `MOMENTS`: the second largest value and the entropy too.
    - `FILTERED`: top-k, top-p and min-p filters are applied first, which sorts the logits.
    """

    TOP = 0
    MOMENTS = 1
    FILTERED = 2


class RowSampling(NamedTuple):
    """How each row's token is drawn.

    - `keys`, `positions`: key the noise.
    - `temperature`: 0 for no noise.
    - `tempered`: measure confidences on logits / temperature (where that is not 0) instead of clean logits.
    - `top_k`, `top_p`, `min_p`: filters on what is drawn from, by logits / temperature (where that is not 0);
      the vocabulary size, at least 1, and 0 filter nothing. Confidences of tempered rows are measured after
      them, others before.
    - `top_k_first`: measure `top_p` on what `top_k` leaves, instead of the whole distribution.
    - `limit`: ids from here on are removed from the distribution.
    - `token_bans`: ids removed from the distribution; -1 stands for none.
    - `confidence_bans`: ids further removed from `maximum` and `total` only; -1 stands for none.
    """

    keys: Keys
    positions: Int[Tensor, " rows"]
    temperature: Float[Tensor, " rows"]
    tempered: Bool[Tensor, " rows"]
    top_k: Int[Tensor, " rows"]
    top_p: Float[Tensor, " rows"]
    min_p: Float[Tensor, " rows"]
    top_k_first: Bool[Tensor, " rows"]
    limit: Int[Tensor, " rows"]
    token_bans: Ids
    confidence_bans: Ids


class RowDecision(NamedTuple):
    """What is kept of a row's logits, after bans and, where it is tempered, temperature and filters.

    - `token`: argmax of the noised logits, the lowest id on ties.
    - `logit`: the logit of `token`, without noise.
    - `maximum`, `total`: the largest logit and the sum of exp(logit - maximum), f32, so that the
      probability of `token` is exp(logit - maximum) / total.
    - `second`: the second largest logit; 0 below `Level.MOMENTS`.
    - `negative_entropy`: sum of p ln(p + 1e-10), nats; 0 below `Level.MOMENTS`.
    """

    token: Int[Array, " rows"]
    logit: Float[Array, " rows"]
    maximum: Float[Array, " rows"]
    total: Float[Array, " rows"]
    second: Float[Array, " rows"]
    negative_entropy: Float[Array, " rows"]
