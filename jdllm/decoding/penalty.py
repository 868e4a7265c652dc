"""Penalties for ids that sequences hold already."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdllm.arrays import Tensor
from jdllm.pallas.masked_logits import RowPenalty


class Penalty(NamedTuple):
    """Penalties of each segment, as `RowPenalty` describes them for rows.

    - `occurrences`: of each id in what is known of a segment's sequence.
    - `repetition`: above 0; 1 changes nothing.
    - `presence`, `frequency`: 0 changes nothing.
    """

    occurrences: Int[Tensor, "segments vocab"]
    repetition: Float[Tensor, " segments"]
    presence: Float[Tensor, " segments"]
    frequency: Float[Tensor, " segments"]

    def with_tokens(self, tokens: Int[Array, " segments"], live: Bool[Array, " segments"]) -> "Penalty":
        """The penalties after one more generated token of each segment that is `live`."""
        at = jnp.arange(len(tokens)), jnp.where(live, tokens, self.occurrences.shape[1])
        occurrences = jnp.asarray(self.occurrences).at[at].max(1, mode="drop").at[at].add(1, mode="drop")
        return self._replace(occurrences=occurrences)

    def of_rows(self, segment: Int[Array, " rows"]) -> RowPenalty:
        """The penalties of rows that belong to these segments."""
        columns = self.repetition, self.presence, self.frequency
        return RowPenalty(self.occurrences, segment, *(jnp.asarray(x)[segment] for x in columns))
