"""A sequence with a cache that runs layer by layer, with keys in host memory as far as they must be."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jdllm.decoding.batch import Batch, Trace
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.decoding.layer_keys import LayerKeys
from jdllm.decoding.single_layers import SingleLayers
from jdllm.decoding.step import AskedRows, keyed_bits, run_steps, step_behind
from jdllm.execution.offload.cached_layer import Keeping, last_refresh_layer, refresh_layer, reuse_layer
from jdllm.execution.offload.layered import Layering
from jdllm.execution.paged.selection import USUAL_BLOCK, USUAL_WIDTH, Selection
from jdllm.execution.transformer import Wanted, embed
from jdllm.models.block import Hidden, RowInts
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import dtypes_of
from jdllm.models.weights import Params

Call = Callable[..., Any]
"""Compiles and runs a function: `jdllm.compiling.executables.Executables.call`."""


class LayeredCache:
    """The stored keys and values of one sequence, and what refreshes and reuses them.

    Arguments:
    - `params`, `config`: the model, its weights on the device or the last layers' in host memory.
    - `layering`: the sizes of its arrays, and the layers whose keys stay on the device.
    - `length`: tokens of the sequence, masks included.
    - `call`: compiles and runs the parts.

    It chooses the same tokens as `jdllm.decoding.cached` with the cache "dual", and with selections as with
    the caches "sparse" and "head_sparse". One caller at a time. Its arrays are free once nobody refers to it.
    """

    def __init__(self, params: Params, config: ModelConfig, layering: Layering, length: int, call: Call):
        self._params, self._config, self._layering, self._call = params, config, layering, call
        self._layers = SingleLayers(params, config)
        self._length = np.int32(length)
        self._h: Hidden | None = None
        self._read = 0
        self._keys = self._no_keys()
        self._done: Array | None = None
        self._kept: np.int32 | None = None

    @property
    def read(self) -> int:
        """How many layers of a refresh have run; 0 where none has begun."""
        return self._read

    def some_layers(
        self, tokens: Int[np.ndarray, " rows"], layers: int, selection: Selection | None, *, stores: bool
    ) -> Array:
        """Run so many more layers of a refresh, but not the last one.

        Arguments:
        - `tokens`: of the sequence, as many as `layering.rows`.
        - `selection`: which rows each layer keeps; `None` for all.
        - `stores`: whether the sequence is refreshed; else the step is whole, and nothing is stored.

        Returns an array to wait for.
        """
        h = self._h
        if h is None:
            self._keys, self._done = self._no_keys(), None
            h = self._h = self._call(embed, self._layers.embedding, tokens)
        done = h[0, :1]
        for number in range(self._read, min(self._read + layers, self._config.num_layers - 1)):
            self._keys.wait_for_leaving()
            self._h, stored, done = self._call(
                refresh_layer,
                *self._layers[number],
                self._h,
                self._length,
                selection,
                donate=("h",),
                **self._static(selection),
            )
            self._read += 1
            if stores:
                self._keys.store(stored)
        return done

    def refreshed(
        self, batch: Batch, wanted: range, selection: Selection | None, *, stores: bool, **static: Any
    ) -> EncodedTrace:
        """Run the last layer of a refresh, and its step.

        Arguments:
        - `batch`: the whole sequence, packed into `layering.rows` rows.
        - `wanted`: the rows that predict what the step may commit.
        - `selection`, `stores`: as for the layers before.
        - `static`: the static arguments of a cached step.
        """
        self._keys.wait_for_leaving()
        first = np.int32(wanted.start)
        rows, stored = self._call(
            last_refresh_layer,
            *self._layers[-1],
            self._h,
            self._length,
            first,
            selection,
            rows=len(wanted),
            **self._static(selection),
        )
        if stores:
            self._keys.store(stored)
            self._kept = None if selection is None else np.int32(selection.keep[0])
        self._h, self._read = None, 0
        return self._call(_refreshed, self._layers.head, batch, rows, first, **static)

    def reused(self, batch: Batch, start: int, **static: Any) -> EncodedTrace:
        """Run one step of the rows that are not stored.

        Arguments:
        - `batch`: these rows, which follow one another.
        - `start`: the position of the first.
        - `static`: the static arguments of a cached step.
        """
        h = self._call(embed, self._layers.embedding, batch.tokens)
        for number in range(self._config.num_layers):
            h, stored, self._done = self._call(
                reuse_layer,
                *self._layers[number],
                h,
                self._keys.of(number, self._done),
                np.int32(start),
                self._length,
                self._kept,
                donate=("stored",),
                config=self._config,
            )
            self._keys.replace(number, stored)
        return self._call(_reused, self._layers.head, batch, h, **static)

    def compile(self, compile: Call, rows: int, selection: Selection | None = None) -> list[Any]:
        """The executables of its layers.

        Arguments:
        - `compile`: `jdllm.compiling.executables.Executables.compile`.
        - `rows`: that a reuse evaluates.
        - `selection`: of a refresh.
        """
        config, layering = self._config, self._layering
        dtype, zero = dtypes_of(self._params).activations, np.int32(0)
        h, some = (jax.ShapeDtypeStruct((n, config.hidden_size), dtype) for n in (layering.rows, rows))
        keys = jax.ShapeDtypeStruct((layering.stored, config.num_kv_heads, config.head_dim), dtype)
        static, found = self._static(selection), []
        kept = None if selection is None else zero
        for stack in self._layers.stacks:
            whole = stack, zero, h, self._length, selection
            found.append(compile(refresh_layer, *whole, donate=("h",), **static))
            few = stack, zero, some, (keys, keys), zero, self._length, kept
            found.append(compile(reuse_layer, *few, donate=("stored",), config=config))
        last = self._layers.last_stack, zero, h, self._length, zero, selection
        found.append(compile(last_refresh_layer, *last, rows=rows, **static))
        return found

    def _static(self, selection: Selection | None) -> dict[str, Any]:
        """Static arguments of a layer of a refresh."""
        static = {"config": self._config, "chunk": self._layering.chunk}
        if selection is None:
            return static
        usual = selection.block_rows[0] <= USUAL_BLOCK and selection.width[0] <= USUAL_WIDTH
        return {**static, "keeping": Keeping(self._layering.stored, bool(usual))}

    def _no_keys(self) -> LayerKeys:
        return LayerKeys(self._config.num_layers, self._layering.kept, self._layering.kept_behind)


@encoding
def _refreshed(params: Params, batch: Batch, rows: Hidden, first: Int[Array, ""], **static: Any) -> Trace:
    """The step behind a refresh of which `rows` are known, from the packed row `first` on."""

    def known(_: RowInts, wanted: Wanted) -> tuple[Hidden, None]:
        return rows[(wanted.rows - first).clip(0, rows.shape[0] - 1)], None

    return step_behind(known, params, batch, **static, selection_bits=keyed_bits)[0]


@encoding
def _reused(params: Params, batch: Batch, rows: Hidden, **static: Any) -> Trace:
    """One step of rows whose hidden rows are known."""

    def known(_: RowInts, asked: AskedRows):
        return rows, asked.sources

    return run_steps(known, params, batch, None, **static, selection_bits=keyed_bits)
