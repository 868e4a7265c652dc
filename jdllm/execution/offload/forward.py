"""The transformer for contexts whose residual stream, or keys and values, do not fit on the device.

The host drives small executables (`jdllm.execution.offload.parts`), each for one chunk of rows of one layer,
and moves what they need between pinned host memory and the device. Attention over a long context takes far
longer than the transfers, which hide behind it. `jdllm.execution.offload.tiers.device_buffers` lists what is
on the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jdllm.execution.offload.parts import (
    accumulate,
    attend,
    finish,
    keys_values,
    start_queries,
    store_keys_values,
    take_layer,
)
from jdllm.execution.offload.tiers import HostTiers
from jdllm.execution.transformer import embed
from jdllm.host_memory import Device, pipeline, to_device, to_host
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.layer import Heads, KeysValues, Weights
from jdllm.models.leaf import device_of
from jdllm.models.weights import Params, layer_runs
from jdllm.pallas.attention import AttentionOutput

Call = Callable[..., Any]
"""Compiles and runs a function: `jdllm.compiling.executables.Executables.call`."""


def forward_tiered(
    params: Params,
    config: ModelConfig,
    tokens: RowInts,
    rows: Rows,
    *,
    tiers: HostTiers,
    call: Call,
) -> list[Hidden]:
    """Run all layers over packed rows that are in host memory.

    Arguments:
    - `params`: stacked weights on the device.
    - `config`, `tokens`: the model, and int32 ids of all rows.
    - `rows`: positions and key ranges.
    - `tiers`: arrays in host memory, and the sizes of chunks.
    - `call`: compiles and runs the parts of a layer.

    Returns the hidden rows after the last layer, before the final norm, in chunks of `tiers.chunk_rows` in
    pinned host memory. Exact: equal to the rows of `forward` up to rounding.

    Raises `ValueError` where `tiers.head_groups` does not divide the key-value heads.
    """
    run = _Run(config, tiers, Rows(*map(np.asarray, rows)), device_of(params), call)
    h = run.embed(params["embed"], np.asarray(tokens))
    for layer in run.layers(params):
        if tiers.kv:
            run.apply_streamed(layer, h)
        else:
            run.apply_by_groups(layer, h)
        del layer  # it would stay there while the next one is copied
    return h


class _Visit(NamedTuple):
    """A chunk of queries and a chunk of keys that it sees; whether it is the first or last such chunk."""

    queries: int
    keys: int
    first: bool
    last: bool


class _Queries(NamedTuple):
    """A chunk of rows on its way through a layer, and its attention over the keys that have passed."""

    h: Hidden
    rows: Rows
    q: Heads
    attended: AttentionOutput


@dataclasses.dataclass(frozen=True)
class _Run:
    """One evaluation of the model. Methods `apply_*` replace the chunks of `h` by those after one layer."""

    config: ModelConfig
    tiers: HostTiers
    rows: Rows
    device: Device
    call: Call

    def embed(self, matrix: Array, tokens: np.ndarray) -> list[Hidden]:
        h: list[Any] = [None] * len(self._bounds)

        def fetch(i: int) -> Array:
            return to_device(tokens[slice(*self._bounds[i])], self.device)

        def look_up(i: int, ids: Array) -> Hidden:
            h[i] = to_host(self.call(embed, {"embed": matrix}, ids), self.device)
            return h[i]

        pipeline(range(len(h)), fetch, look_up)
        return h

    def layers(self, params: Params) -> Iterator[Weights]:
        """A copy of the weights of each layer, in order."""
        for name, start, end in layer_runs(self.config):
            for place in range(start, end):
                yield self.call(take_layer, params[name], np.int32(place))

    def apply_by_groups(self, layer: Weights, h: list[Hidden]) -> None:
        """With the keys and values of one group of heads at a time on the device.

        The outputs of all groups but the last wait in host memory, so that there is one output projection
        over all heads, as in the whole model.
        """
        outputs: list[list[Heads]] = [[] for _ in h]
        for group in range(self.tiers.head_groups):
            self._apply_group(layer, h, outputs, group)

    def _apply_group(self, layer: Weights, h: list[Hidden], outputs: list[list[Heads]], index: int) -> None:
        group = to_device(np.int32(index), self.device)
        stored = self._project_group(layer, h, group)
        last = index == self.tiers.head_groups - 1

        def fetch(i: int) -> tuple[Hidden, Rows, list[Heads]]:
            return to_device((h[i], self._rows_of(i), outputs[i] if last else []), self.device)

        def attend_chunk(i: int, fetched: tuple[Hidden, Rows, list[Heads]]) -> Array:
            part, rows, earlier = fetched
            o = self.call(
                attend,
                layer,
                part,
                rows,
                stored,
                group,
                config=self.config,
                groups=self.tiers.head_groups,
            )
            if last:
                return self._finish(layer, h, i, part, [*earlier, o])
            outputs[i].append(to_host(o, self.device))
            return outputs[i][-1]

        pipeline(range(len(h)), fetch, attend_chunk)

    def _project_group(self, layer: Weights, h: list[Hidden], group: Array) -> KeysValues:
        heads = self.tiers.heads(self.config)[1]
        shape = (len(self.rows.positions), heads, self.config.head_dim)
        empty = functools.partial(jnp.zeros, shape, h[0].dtype, device=self.device)
        stored: KeysValues = (empty(), empty())

        def fetch(i: int) -> tuple[Hidden, Array, Array]:
            start = np.int32(self._bounds[i][0])
            return to_device((h[i], self._rows_of(i).positions, start), self.device)

        def project(i: int, fetched: tuple[Hidden, Array, Array]) -> Array:
            nonlocal stored
            stored, done = self.call(
                store_keys_values,
                stored,
                layer,
                *fetched,
                group,
                donate=("stored",),
                config=self.config,
                groups=self.tiers.head_groups,
            )
            return done

        pipeline(range(len(h)), fetch, project)
        return stored

    def apply_streamed(self, layer: Weights, h: list[Hidden]) -> None:
        """With keys and values in host memory: for every chunk of queries they pass through the device in
        chunks, whose attention is merged with the attention of the chunks before."""
        stored = self._project_to_host(layer, h)
        running: _Queries

        def fetch(visit: _Visit) -> tuple[tuple[Hidden, Rows] | None, KeysValues, Array]:
            queries = (h[visit.queries], self._rows_of(visit.queries)) if visit.first else None
            start = np.int32(self._bounds[visit.keys][0])
            return to_device((queries, stored[visit.keys], start), self.device)

        def attend_chunk(
            visit: _Visit, fetched: tuple[tuple[Hidden, Rows] | None, KeysValues, Array]
        ) -> Array:
            nonlocal running
            queries, part, start = fetched
            if queries is not None:
                begun = self.call(start_queries, layer, queries[0], queries[1].positions, config=self.config)
                running = _Queries(*queries, *begun)
            attended, done = self.call(
                accumulate,
                running.attended,
                running.q,
                running.rows,
                part,
                start,
                donate=("attended",),
                config=self.config,
            )
            running = running._replace(attended=attended)
            if visit.last:
                return self._finish(layer, h, visit.queries, running.h, [attended.o])
            return done

        pipeline(self._visits, fetch, attend_chunk)

    def _project_to_host(self, layer: Weights, h: list[Hidden]) -> list[KeysValues]:
        group = to_device(np.int32(0), self.device)
        static = {"config": self.config, "groups": 1}
        stored: list[KeysValues] = []

        def fetch(i: int) -> tuple[Hidden, Array]:
            return to_device((h[i], self._rows_of(i).positions), self.device)

        def project(i: int, fetched: tuple[Hidden, Array]) -> KeysValues:
            stored.append(to_host(self.call(keys_values, layer, *fetched, group, **static), self.device))
            return stored[-1]

        pipeline(range(len(h)), fetch, project)
        return stored

    def _finish(self, layer: Weights, h: list[Hidden], i: int, part: Hidden, outputs: list[Heads]) -> Hidden:
        after = self.call(finish, layer, part, outputs, donate=("h",), config=self.config)
        h[i] = to_host(after, self.device)
        return h[i]

    @functools.cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        return self.tiers.bounds(len(self.rows.positions))

    def _rows_of(self, i: int) -> Rows:
        start, stop = self._bounds[i]
        return Rows(*(x[start:stop] for x in self.rows))

    @functools.cached_property
    def _visits(self) -> list[_Visit]:
        """Which chunks of keys each chunk of queries sees: at least one, so that padding gets its output."""
        visits = []
        for i in range(len(self._bounds)):
            rows = self._rows_of(i)
            seen = [
                j
                for j, (start, stop) in enumerate(self._bounds)
                if np.any((rows.k_start < rows.k_end) & (rows.k_start < stop) & (rows.k_end > start))
            ]
            visits += [_Visit(i, j, j == seen[0], j == seen[-1]) for j in seen] or [_Visit(i, 0, True, True)]
        return visits
