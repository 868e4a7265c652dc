"""The transformer with some layers' weights in host memory: the host drives it, a layer at a time."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jdllm.chunks import ChunkConfig
from jdllm.execution.offload.host_memory import Device, to_device, to_host
from jdllm.execution.offload.placement import single_layer
from jdllm.execution.transformer import apply_layers, embed
from jdllm.models import leaf
from jdllm.models.block import Hidden, RowInts, Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params

_HOST = "pinned_host"


class OffloadedWeights:
    """The weights of a model, some of its layers' in pinned host memory.

    Arguments:
    - `config`: the model.
    - `top`: "final_norm" and "head" on the device, and "embed": on the device where the head is tied to it,
      else a NumPy array.
    - `layers`: the weights of each layer, as `jdllm.models.weights.layer_specs` lists them, each
      where `place_layer` has put it.
    - `device`: where the model runs.

    A layer is copied to the device while the layers before it are computed, the first of a step while the
    step before it ends. One caller at a time.
    """

    def __init__(self, config: ModelConfig, top: Params, layers: Sequence[Params], device: Device):
        self.config = config
        self.top = top
        self.device = device
        self._layers = layers
        self._offloaded = itertools.cycle([i for i, layer in enumerate(layers) if on_host(layer)])
        self._coming: tuple[int, Params] | None = None
        self._computed: Array | None = None

    @property
    def all(self) -> list[Params]:
        """All weights, wherever they are."""
        return [self.top, *self._layers]

    @property
    def count(self) -> int:
        """Layers in host memory."""
        return sum(map(on_host, self._layers))

    @property
    def device_bytes(self) -> int:
        """Bytes of weights that stay on the device."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.all) if not _off_device(leaf))

    def run(self, tokens: RowInts, rows: Rows, *, chunks: ChunkConfig, call: Callable[..., Any]) -> Hidden:
        """Run all layers over packed rows.

        Arguments:
        - `tokens`, `rows`: ids, and positions and key ranges, of all rows; NumPy arrays.
        - `chunks`: chunk counts; the count of the logits has no effect.
        - `call`: compiles and runs a function: `jdllm.compiling.executables.Executables.call`.

        Returns the hidden rows after the last layer, before the final norm. Exact: equal to the
        rows of `forward` up to rounding.
        """
        placed = to_device(rows, self.device)
        h = self._embedded(np.asarray(tokens), call)
        for layer, offloaded in self._in_order():
            (stack,) = layer
            static = {"config": single_layer(self.config, stack), "chunks": chunks}
            h, done = call(apply_one, h, layer, placed, donate=("h",), **static)
            if offloaded:
                self._computed = done
            del layer  # its memory is for the layer after the next
        return h

    def compile(self, rows: Rows, chunks: ChunkConfig, compile: Callable[..., Any]) -> list[Any]:
        """Executables of one layer of each kind, for `run` with as many rows.

        Arguments:
        - `compile`: `jdllm.compiling.executables.Executables.compile`.
        """
        h = jax.ShapeDtypeStruct(
            (len(rows.positions), self.config.hidden_size), leaf.dtypes_of(self.top).activations
        )
        kinds = {next(iter(layer)): layer for layer in self._layers}
        abstract = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
        return [
            compile(
                apply_one,
                h,
                abstract(layer),
                abstract(rows),
                donate=("h",),
                config=single_layer(self.config, stack),
                chunks=chunks,
            )
            for stack, layer in kinds.items()
        ]

    def _embedded(self, tokens: np.ndarray, call: Callable[..., Any]) -> Hidden:
        matrix = self.top["embed"]
        if isinstance(matrix, np.ndarray):
            return to_device(leaf.rows(matrix, tokens), self.device)
        return call(embed, {"embed": matrix}, tokens)

    def _in_order(self) -> Iterator[tuple[Params, bool]]:
        """All layers on the device, and whether each came out of host memory.

        XLA starts a copy after all computation that was enqueued before it. So the copy of the next layer is
        enqueued before this one is given away to be computed, and after the one before was computed: a copy
        takes its memory when it is enqueued.
        """
        for number, layer in enumerate(self._layers):
            if not on_host(layer):
                yield layer, False
                continue
            jax.block_until_ready(self._computed)
            here, self._coming = self._take(number), None
            self._coming = self._start()
            yield here, True
            del here

    def _take(self, number: int) -> Params:
        """The layer that was to come; after a step that failed it may be another one."""
        while self._coming is None or self._coming[0] != number:
            self._coming = None
            self._coming = self._start()
        return self._coming[1]

    def _start(self) -> tuple[int, Params]:
        number = next(self._offloaded)
        return number, to_device(self._layers[number], self.device)


def apply_one(
    h: Hidden, layer: Params, rows: Rows, *, config: ModelConfig, chunks: ChunkConfig
) -> tuple[Hidden, Array]:
    """One layer, for a model that has no other.

    Arguments:
    - `h`: hidden rows before the layer.
    - `layer`: the parameter tree of the layer alone.
    - `rows`: positions and key ranges.
    - `config`, `chunks`: the model, and chunk counts; static.

    Returns the rows after the layer, and an array to wait for that is not donated.
    """
    h = apply_layers(layer, config, h, rows, chunks=chunks)
    return h, h[0, :1]


def place_weights(device: Device, offloaded: Collection[int]) -> Callable[[int | None, Params], Params]:
    """Puts weights where `OffloadedWeights` has them: a layer by its number, and weights outside of layers.

    Arguments:
    - `device`: where they are.
    - `offloaded`: the layers that go to pinned host memory. A separate embedding goes to host memory too:
      single rows of it are read.
    """

    def place(number: int | None, weights: Params) -> Params:
        if number is None:
            return weights | ({"embed": jax.device_get(weights["embed"])} if "head" in weights else {})
        return jax.block_until_ready(to_host(weights, device)) if number in offloaded else weights

    return place


def on_host(layer: Params) -> bool:
    return all(map(_off_device, jax.tree.leaves(layer)))


def _off_device(leaf: Array | np.ndarray) -> bool:
    return isinstance(leaf, np.ndarray) or leaf.sharding.memory_kind == _HOST
