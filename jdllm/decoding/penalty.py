"""The head with a repetition penalty."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.decoding.batch import SegmentParams
from jdllm.decoding.head import Choice, choice_by
from jdllm.layers import head_logits
from jdllm.models.weights import Params, head_weights
from jdllm.pallas.masked_logits import Level, RowDecision, RowSampling
from jdllm.pallas.masked_logits.xla import decide_logits


class Penalty(NamedTuple):
    """Repetition penalties.

    - `seen`: ids that occur in the prompt or in what was generated.
    - `factor`: above 0; 1 changes nothing.
    """

    seen: Bool[Tensor, "segments vocab"]
    factor: Float[Tensor, " segments"]

    def with_tokens(self, tokens: Int[Array, " segments"], live: Bool[Array, " segments"]) -> "Penalty":
        """The penalties after one more token of each segment that is `live`."""
        segment = jnp.arange(len(tokens))
        ids = jnp.where(live, tokens, self.seen.shape[1])
        return self._replace(seen=jnp.asarray(self.seen).at[segment, ids].set(True, mode="drop"))


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
    """`jdllm.decoding.head.decide` on logits with a repetition penalty, which exist in f32 for all rows.

    Arguments:
    - `params`, `h`, `segment`, `positions`, `segments`, `step`, `level`: as in `decide`.
    - `count`: as in `decide`, but all rows are evaluated whatever it is.
    - `penalty`: of each segment.

    Log-probabilities are those after the penalty. Where `decide` takes the portable form, as on a CPU, rows
    with a penalty of 1 get from both the same bits.
    """
    logits = head_logits(h, head_weights(params))
    logits = _penalised(logits, *(jnp.asarray(x)[segment] for x in penalty))
    # Fused with the penalty, sums over the vocabulary could differ from those of `decide` in the last bit.
    logits = lax.optimization_barrier(logits)

    def reduce(rows: RowSampling) -> RowDecision:
        return decide_logits(logits, rows, level)

    return choice_by(reduce, segment, positions, segments, step, h.dtype)


def _penalised(
    logits: Float[Array, "rows vocab"], seen: Bool[Array, "rows vocab"], penalty: Float[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    """Logits of ids that were seen, divided by the penalty where positive and multiplied elsewhere."""
    by = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / by, logits * by), logits)
