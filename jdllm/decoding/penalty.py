"""The head with penalties for ids that a sequence has already."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.decoding.batch import SegmentParams
from jdllm.decoding.head import Choice, choice_by
from jdllm.models import leaf
from jdllm.models.weights import Params, head_weights
from jdllm.pallas.masked_logits import Level, RowDecision, RowSampling
from jdllm.pallas.masked_logits.xla import decide_logits


class Counted(NamedTuple):
    """Penalties by how often an id was generated.

    - `counts`: how often each was.
    - `presence`: taken from the logit of an id that was generated at all; `frequency`: each time that it was.
      0 changes nothing.
    """

    counts: Int[Tensor, "segments vocab"]
    presence: Float[Tensor, " segments"]
    frequency: Float[Tensor, " segments"]


class Penalty(NamedTuple):
    """Penalties of each segment.

    - `seen`: ids that occur in the prompt or in what was generated.
    - `factor`: of repetition, above 0; 1 changes nothing.
    - `counted`: `None` where no segment has such a penalty.
    """

    seen: Bool[Tensor, "segments vocab"]
    factor: Float[Tensor, " segments"]
    counted: Counted | None = None

    def with_tokens(self, tokens: Int[Array, " segments"], live: Bool[Array, " segments"]) -> "Penalty":
        """The penalties after one more token of each segment that is `live`."""
        at = jnp.arange(len(tokens)), jnp.where(live, tokens, self.seen.shape[1])
        seen, counted = jnp.asarray(self.seen).at[at].set(True, mode="drop"), self.counted
        if counted is not None:
            counted = counted._replace(counts=jnp.asarray(counted.counts).at[at].add(1, mode="drop"))
        return self._replace(seen=seen, counted=counted)


def decide_penalised(
    params: Params,
    h: Float[Array, "head hidden"],
    segment: Int[Tensor, " head"],
    positions: Int[Array, " head"],
    segments: SegmentParams,
    step: Int[Tensor, " segments"],
    count: Int[Array, ""] | int,
    penalty: Penalty,
    *,
    level: Level,
) -> Choice:
    """`jdllm.decoding.head.decide` on logits with penalties, which exist in f32 for all rows.

    Arguments:
    - `params`, `h`, `segment`, `positions`, `segments`, `step`, `level`: as in `decide`.
    - `count`: as in `decide`, but all rows are evaluated whatever it is.
    - `penalty`: of each segment.

    Log-probabilities are those after the penalties. Where `decide` takes the portable form, as on a CPU, rows
    without an effective penalty get from both the same bits.
    """
    logits = leaf.logits(h, head_weights(params))
    logits = _penalised(logits, jax.tree.map(lambda x: jnp.asarray(x)[segment], penalty))
    # Fused with the penalties, sums over the vocabulary could differ from those of `decide` in the last bit.
    logits = lax.optimization_barrier(logits)

    def reduce(rows: RowSampling) -> RowDecision:
        return decide_logits(logits, rows, level)

    return choice_by(reduce, segment, positions, segments, step, h.dtype)


def _penalised(logits: Float[Array, "rows vocab"], penalty: Penalty) -> Float[Array, "rows vocab"]:
    """Logits of ids that were seen, divided by the factor where positive and multiplied elsewhere; then less
    what counts take. The penalties are those of the rows."""
    seen, factor, counted = penalty
    by = jnp.asarray(factor)[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / by, logits * by), logits)
    if counted is None:
        return logits
    presence, frequency = (jnp.asarray(x)[:, None] for x in (counted.presence, counted.frequency))
    return logits - frequency * counted.counts - jnp.where(counted.counts > 0, presence, 0)
