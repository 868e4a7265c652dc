"""The contract of masked logits."""

import enum
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jdllm.arrays import Tensor
from jdllm.pallas.listed import LISTED

Ids = Int[Tensor, "rows bans"]
Keys = tuple[UInt32[Array, " rows"], UInt32[Array, " rows"]]


ANY = -1
"""Stands for no id of a word."""


class Level(enum.IntEnum):
    """How much is computed of each row's distribution; each level includes those before it.

    - `TOP`: what the token's own probability needs.
    - `MOMENTS`: the second largest value and the entropy too.
    - `FILTERED`: controls, and top-k, top-p and min-p filters, which sort the logits, are applied first; and
      the likeliest ids of rows are listed.
    """

    TOP = 0
    MOMENTS = 1
    FILTERED = 2


class RowPenalty(NamedTuple):
    """Penalties for ids that a row's sequence holds; they come before everything else that a row asks for.

    - `occurrences`: of each id in each sequence: 0 where the sequence does not hold the id; else 1, and 1
      more for each time that the id was generated.
    - `sequence`: which sequence each row belongs to.
    - `repetition`: the logit of an id that occurs is divided by this where it is positive, and multiplied
      elsewhere; 1 changes nothing.
    - `presence`, `frequency`: then taken from the logit of an id that was generated, once and each time.
    """

    occurrences: Int[Tensor, "sequences vocab"]
    sequence: Int[Tensor, " rows"]
    repetition: Float[Tensor, " rows"]
    presence: Float[Tensor, " rows"]
    frequency: Float[Tensor, " rows"]


class RowLowered(NamedTuple):
    """One id of each row whose logit is lowered before everything else that the row asks for.

    - `ids`: of the whole vocabulary.
    - `by`: taken from the logit; 0 changes nothing.
    """

    ids: Int[Tensor, " rows"]
    by: Float[Tensor, " rows"]


class RowControl(NamedTuple):
    """Which ids each row may have, and numbers that are added to some logits, before everything else that the
    row asks for.

    - `controlled`: rows that ask for any of these; the others have what changes nothing.
    - `allowed`: a bit for each id, the lowest bit of a word first: without its bit an id has no logit.
    - `ids`: ids whose logits are raised, all different in a row. Those outside the vocabulary stand for none.
    - `early`, `late`: added to their logits in rows whose position is below `until`, and in all others; -inf
      removes an id.
    - `until`: a position.
    - `words`: ids of words, one after another, `ANY` before the first: where a row comes behind all but the
      last of them, the last has no logit. A word of `ANY` alone is none. `None` where no row has a word.
    - `left`: the ids to the left of each row, one fewer than words have, `ANY` where there is none.
    """

    controlled: Bool[Tensor, " rows"]
    allowed: UInt32[Tensor, "rows words"]
    ids: Int[Tensor, "rows raised"]
    early: Float[Tensor, "rows raised"]
    late: Float[Tensor, "rows raised"]
    until: Int[Tensor, " rows"]
    words: Int[Tensor, "rows words length"] | None = None
    left: Int[Tensor, "rows before"] | None = None


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
    - `listed`: rows whose likeliest ids are wanted.
    - `penalty`: `None` where no row has one.
    - `lowered`: `None` where no row has one. It counts at `Level.FILTERED` only.
    - `control`: `None` where no row has one. It counts at `Level.FILTERED` only.
    - `first_id`: of the whole vocabulary, the id that keys the noise of the head's first id: a multiple of
      256, the same for all rows. `None` for 0. All other ids count from the head's first one.
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
    listed: Bool[Tensor, " rows"]
    penalty: RowPenalty | None = None
    lowered: RowLowered | None = None
    control: RowControl | None = None
    first_id: Int[Tensor, " rows"] | None = None

    @property
    def divisor(self) -> Float[Array, " rows"]:
        """What each row's logits are divided by before they are measured."""
        temperature = jnp.asarray(self.temperature, jnp.float32)
        return jnp.where(jnp.asarray(self.tempered) & (temperature > 0), temperature, 1.0)


class Likeliest(NamedTuple):
    """The likeliest ids of each row, the likeliest first, of equals the lowest.

    - `ids`: of as many as there are; unspecified where the value is -inf.
    - `values`: their logits, or their log-probabilities.
    """

    ids: Int[Tensor, "*steps rows listed"]
    values: Float[Tensor, "*steps rows listed"]

    @classmethod
    def nothing(cls, *shape: int) -> "Likeliest":
        """Of so many steps and rows none."""
        return cls(jnp.zeros((*shape, LISTED), jnp.int32), jnp.full((*shape, LISTED), -jnp.inf))


class RowDecision(NamedTuple):
    """What is kept of a row's logits, after controls, penalties, bans and, of a tempered row, temperature and
    filters.

    - `token`: argmax of the noised logits, the lowest id on ties.
    - `logit`: the logit of `token`, without noise.
    - `maximum`, `total`: the largest logit and the sum of exp(logit - maximum), f32, so that the
      probability of `token` is exp(logit - maximum) / total.
    - `second`: the second largest logit; 0 below `Level.MOMENTS`.
    - `negative_entropy`: sum of p ln(p + 1e-10), nats; 0 below `Level.MOMENTS`.
    - `likeliest`: the ids with the largest of the logits that `maximum` and `total` are of, and these logits;
      unspecified where no row is `listed`, and `None` below `Level.FILTERED`.
    """

    token: Int[Array, " rows"]
    logit: Float[Array, " rows"]
    maximum: Float[Array, " rows"]
    total: Float[Array, " rows"]
    second: Float[Array, " rows"]
    negative_entropy: Float[Array, " rows"]
    likeliest: Likeliest | None = None
