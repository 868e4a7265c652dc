"""A causal sequence that runs layer by layer, with keys and values in host memory as far as it must be."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jdllm.decoding.batch import HeadRows, SegmentParams, Trace
from jdllm.decoding.causal import chosen, committing
from jdllm.decoding.encoded_trace import EncodedTrace, encoding
from jdllm.decoding.layer_keys import LayerKeys
from jdllm.decoding.penalty import Penalty
from jdllm.decoding.single_layers import SingleLayers
from jdllm.execution.offload.layered import (
    Generated,
    Layering,
    generate_layer,
    last_layer,
    prefill_layer,
)
from jdllm.execution.transformer import embed
from jdllm.host_memory import to_device
from jdllm.models.block import Hidden
from jdllm.models.config import ModelConfig
from jdllm.models.leaf import device_of, dtypes_of
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import Level

Call = Callable[..., Any]
"""Compiles and runs a function: `jdllm.compiling.executables.Executables.call`."""


class LayeredSequence:
    """One sequence, its prompt first.

    Arguments:
    - `params`, `config`: the model, its weights on the device.
    - `layering`: the sizes of its arrays, and the layers whose keys stay on the device.
    - `prompt`: its tokens.
    - `call`: compiles and runs the parts.

    Exact: `jdllm.decoding.causal` would choose the same tokens. One caller at a time. Its arrays are free
    once nobody refers to it.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        layering: Layering,
        prompt: Int[np.ndarray, " prompt"],
        call: Call,
    ):
        self._params, self._config, self._layering, self._call = params, config, layering, call
        self._layers = SingleLayers(params, config)
        self._tokens = np.zeros(layering.rows, np.int32)
        self._tokens[: len(prompt)] = prompt
        self._length = np.int32(len(prompt))
        self._h: Hidden | None = None
        self._keys = LayerKeys(config.num_layers, layering.kept, layering.kept_behind)
        self._generated: Generated | None = None
        self._count = 0
        self._done: Array | None = None

    @property
    def read(self) -> int:
        """How many layers have read the prompt."""
        return len(self._keys)

    def prefill(self, layers: int) -> Array:
        """Read the prompt with so many more layers, but not the last one.

        Returns an array to wait for.
        """
        h = self._h
        if h is None:
            h = self._h = self._call(embed, self._layers.embedding, self._tokens)
        done = h[0, :1]
        for number in range(self.read, min(self.read + layers, self._config.num_layers - 1)):
            self._keys.wait_for_leaving()
            stack, place = self._layers[number]
            self._h, stored, done = self._call(
                prefill_layer, stack, place, self._h, self._length, donate=("h",), **self._static
            )
            self._keys.store(stored)
        return done

    def first_token(
        self, segments: SegmentParams, plain: Int[np.ndarray, ""], penalty: Penalty | None
    ) -> EncodedTrace:
        """Read the prompt with the last layer, and choose the token behind it.

        Arguments:
        - `segments`: what the sequence asks of the sampler, as one segment.
        - `plain`: 1 if it has no filter and is not listed, else 0.
        - `penalty`: of the ids that the prompt holds; `None` without one.
        """
        self._keys.wait_for_leaving()
        stack, place = self._layers[-1]
        row, stored = self._call(last_layer, stack, place, self._h, self._length, **self._static)
        self._keys.store(stored)
        self._h, self._tokens = None, self._tokens[:0]
        return self._choose(row, self._length, segments, plain, penalty)

    def next_token(
        self, token: int, segments: SegmentParams, plain: Int[np.ndarray, ""], penalty: Penalty | None
    ) -> EncodedTrace:
        """Evaluate the last token, and choose the token behind it; `segments`, `plain` and `penalty` have the
        same meaning as for the first token."""
        if self._generated is None:
            dtype = dtypes_of(self._params).pool
            nothing = _nothing_generated(self._config, self._layering, dtype)
            self._generated = to_device(nothing, device_of(self._params))
        h = self._call(embed, self._layers.embedding, np.array([token], np.int32))
        for number in range(self._config.num_layers):
            stack, place = self._layers[number]
            h, self._generated, self._done = self._call(
                generate_layer,
                stack,
                place,
                np.int32(number),
                h,
                self._keys.of(number, self._done),
                self._generated,
                self._length,
                np.int32(self._count),
                donate=("generated",),
                config=self._config,
            )
        self._count += 1
        return self._choose(h, self._length + np.int32(self._count), segments, plain, penalty)

    def compile(self, compile: Call) -> list[Any]:
        """The executables of its layers.

        Arguments:
        - `compile`: `jdllm.compiling.executables.Executables.compile`.
        """
        config, layering = self._config, self._layering
        _, dtype, pool = dtypes_of(self._params)
        h = jax.ShapeDtypeStruct((layering.rows, config.hidden_size), dtype)
        keys = jax.ShapeDtypeStruct((layering.rows, config.num_kv_heads, config.head_dim), dtype)
        behind = jax.eval_shape(lambda: _nothing_generated(config, layering, pool))
        count, found = np.int32(0), []
        for stack in self._layers.stacks:
            of_prompt = (stack, count, h, self._length)
            found.append(compile(prefill_layer, *of_prompt, donate=("h",), **self._static))
            row = (stack, count, count, jax.ShapeDtypeStruct((1, config.hidden_size), dtype))
            arguments = *row, (keys, keys), behind, self._length, count
            found.append(compile(generate_layer, *arguments, donate=("generated",), config=config))
        found.append(compile(last_layer, self._layers.last_stack, *of_prompt[1:], **self._static))
        return found

    @property
    def _static(self) -> dict[str, Any]:
        return {"config": self._config, "chunk": self._layering.chunk}

    def _choose(
        self,
        row: Hidden,
        position: np.int32,
        segments: SegmentParams,
        plain: Int[np.ndarray, ""],
        penalty: Penalty | None,
    ) -> EncodedTrace:
        return self._call(
            _token, self._layers.head, row, position, segments, plain, penalty, config=self._config
        )


def _nothing_generated(config: ModelConfig, layering: Layering, dtype: Any) -> Generated:
    shape = config.num_layers, layering.generated, config.num_kv_heads, config.head_dim
    return Generated(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


@encoding
def _token(
    params: Params,
    row: Hidden,
    position: Int[Array, ""],
    segments: SegmentParams,
    plain: Int[Array, ""],
    penalty: Penalty | None,
    *,
    config: ModelConfig,
) -> Trace:
    """The trace of one token at `position`, from the hidden row before it."""
    first = jnp.zeros(1, jnp.int32)
    head = HeadRows(first, first, first)
    at, step = jnp.asarray(position)[None], jnp.asarray(segments.step)
    count = jnp.int32(1), jnp.asarray(plain)
    choice = chosen(params, config, row, head, at, segments, step, count, penalty, Level.FILTERED)
    return Trace(
        jnp.int32(1), *(x[None] for x in committing(choice, jnp.ones(1, bool))), likeliest=choice.likeliest
    )
