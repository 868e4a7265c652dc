"""Refreshes whose operators run in chunks of rows, for sequences whose activations do not fit as a whole."""

from typing import NamedTuple

from jax import lax
from jaxtyping import Array, Int

from jdllm.chunks import ChunkConfig
from jdllm.execution.chunked import (
    attend_in_chunks,
    feed_forward_in_chunks,
    keys_values_in_chunks,
    last_of,
    unrolled,
)
from jdllm.execution.paged.pool import KvArrays
from jdllm.execution.paged.selection import Queries, Storing
from jdllm.models.block import Hidden, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import KeysValues, Layer
from jdllm.models.rotary import rotation_at
from jdllm.models.weights import Params


class CutRefresh(NamedTuple):
    """What is the same in all layers.

    - `rows`: positions and key ranges of all packed rows.
    - `storing`: which of them are stored.
    """

    rows: Rows
    storing: Storing

    def run(
        self, params: Params, config: ModelConfig, h: Hidden, pool: KvArrays, chunks: ChunkConfig
    ) -> tuple[Hidden, KvArrays]:
        """Run all layers, with the same result as a refresh of whole operators.

        Arguments:
        - `params`, `config`: stacked weights, and the model; the latter is static.
        - `h`: embedded rows.
        - `pool`: written in place; donate it.
        - `chunks`: static; key-value heads are one group.

        Returns the hidden rows after the last layer, and the pool.
        """
        chunks = chunks.in_loops()

        def body(carry: tuple[Hidden, KvArrays], layer: Layer) -> tuple[Hidden, KvArrays]:
            h, pool = carry
            keys_values = keys_values_in_chunks(layer, h, self.rows, chunks.kv)
            pool = self._store(layer, h, keys_values, pool)
            # Else XLA would write all layers in the end, and keep their keys and values until then.
            h, pool = lax.optimization_barrier((h, pool))
            h = attend_in_chunks(layer, h, self.rows, keys_values, chunks.query)
            return feed_forward_in_chunks(layer, h, chunks.ffn), pool

        return last_of(unrolled(params, config, (h, pool), body))

    def _store(self, layer: Layer, h: Hidden, keys_values: KeysValues, pool: KvArrays) -> KvArrays:
        """Write the selected rows. Queries are made for the rows of blocks only."""
        config = layer.config

        def queries(places: Int[Array, " some"]) -> Queries:
            rotation = rotation_at(config.rope, config.head_dim, self.rows.positions[places])
            return layer.project(h[places], rotation, ("q",))[0]

        return self.storing.write(pool, config, layer.number, queries, *keys_values)
