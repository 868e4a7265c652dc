"""A trace as few arrays: to the host in one transfer instead of four, or in two where ids are listed."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Shaped

from jdllm.arrays import Tensor
from jdllm.decoding.batch import Trace

LISTED = np.dtype([("id", np.int32), ("logprob", np.float32)])
"""One of the likeliest ids of a position, and its log-probability; -inf where there are no more."""


class EncodedTrace(NamedTuple):
    """A trace on its way to the host.

    - `lines`: one that begins with how many steps ran, then one for each step: for every head row twice the
      token, plus one where it was committed; then the bits of the log-probabilities.
    - `likeliest`: `Trace.likeliest`, each id followed by the bits of its log-probability; `None` where there
      are none or nobody asks.
    - `states`: `Trace.states`.
    """

    lines: Int[Tensor, "capacity+1 2*head"]
    likeliest: Int[Tensor, "*steps head listed 2"] | None
    states: Mapping[str, Mapping[str, Shaped[Tensor, " entries"]]]


class Steps(NamedTuple):
    """The steps that ran.

    - `tokens`: the choice for every head row at each step; 0 where the row was not evaluated.
    - `committed`: the rows whose choice was committed at each step; a row that is edited more than once.
    - `logprobs`: f32, the log-probability of each choice; 0 where the row was not evaluated, and not finite
      where the model's values were not.
    - `likeliest`: `LISTED`, the likeliest ids of each row where it was committed, and unspecified elsewhere;
      of width 0 where nobody asked.
    """

    tokens: Int[np.ndarray, "steps head"]
    committed: Bool[np.ndarray, "steps head"]
    logprobs: Float32[np.ndarray, "steps head"]
    likeliest: Shaped[np.ndarray, "steps head listed"]


def encode(trace: Trace) -> EncodedTrace:
    choices = 2 * trace.tokens + trace.committed
    lines = jnp.concatenate([choices, _bits(trace.logprobs)], axis=1)
    lines = jnp.concatenate([jnp.full((1, lines.shape[1]), trace.steps), lines])
    if trace.likeliest is None:
        return EncodedTrace(lines, None, trace.states)
    ids, values = trace.likeliest
    return EncodedTrace(lines, jnp.stack([ids, _bits(values)], axis=-1), trace.states)


def _bits(values: Tensor) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32)


def decode(encoded: EncodedTrace) -> Steps:
    """The steps that ran, as the device counted them; of NumPy arrays."""
    every = np.asarray(encoded.lines)
    found = None if encoded.likeliest is None else np.asarray(encoded.likeliest)
    head, count = every.shape[1] // 2, every[0, 0]
    lines = every[1 : 1 + count]
    choices, logprobs = lines[:, :head], lines[:, head:]
    likeliest = np.zeros((len(lines), head, 0), LISTED)
    if found is not None:
        listed = np.ascontiguousarray(found).view(LISTED)[..., 0]
        of_steps = listed[:count] if listed.ndim == 3 else listed
        likeliest = np.broadcast_to(of_steps, (len(lines), head, listed.shape[-1]))
    return Steps(choices >> 1, (choices & 1) != 0, logprobs.view(np.float32), likeliest)


def encoding(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the traces among its results encoded.

    Every call makes another function, and thus other executables: call it once.
    """

    def is_trace(x: Any) -> bool:
        return isinstance(x, Trace)

    @functools.wraps(function)
    def run(*args: Any, **static: Any) -> Any:
        out = function(*args, **static)
        return jax.tree.map(lambda x: encode(x) if is_trace(x) else x, out, is_leaf=is_trace)

    return run
