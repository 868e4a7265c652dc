"""A trace as one array: to the host in one transfer instead of four."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

from jdllm.decoding.batch import Trace

EncodedTrace = Int[Array, "capacity+1 2*head"]
"""A line that begins with how many steps ran, then a line for each step: for every head row twice the token,
plus one where it was committed; then the bits of the log-probabilities."""


class Steps(NamedTuple):
    """The steps that ran: `tokens`, `committed` and `logprobs` as of `Trace`."""

    tokens: Int[np.ndarray, "steps head"]
    committed: Bool[np.ndarray, "steps head"]
    logprobs: Float32[np.ndarray, "steps head"]


def encode(trace: Trace) -> EncodedTrace:
    choices = 2 * trace.tokens + trace.committed
    lines = jnp.concatenate([choices, lax.bitcast_convert_type(trace.logprobs, jnp.int32)], axis=1)
    return jnp.concatenate([jnp.full((1, lines.shape[1]), trace.steps), lines])


def decode(encoded: Int[np.ndarray, "capacity+1 2*head"]) -> Steps:
    """The steps that ran, as the device counted them."""
    head = encoded.shape[1] // 2
    lines = encoded[1 : 1 + encoded[0, 0]]
    choices, logprobs = lines[:, :head], lines[:, head:]
    return Steps(choices >> 1, (choices & 1) != 0, logprobs.view(np.float32))


def encoding(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the traces among its results encoded.

    Every call makes another function, and thus other executables: call it once.
    """

    def is_trace(x: Any) -> bool:
        return isinstance(x, Trace)

    def run(*args: Any, **static: Any) -> Any:
        out = function(*args, **static)
        return jax.tree.map(lambda x: encode(x) if is_trace(x) else x, out, is_leaf=is_trace)

    return run
