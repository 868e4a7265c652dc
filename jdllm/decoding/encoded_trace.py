"""A trace as one array: to the host in one transfer instead of three."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jdllm.decoding.batch import Trace

EncodedTrace = Int[Array, "capacity head"]
"""Twice the token of each step and head row, plus one where it was committed; -1 where no step ran."""


def encode(trace: Trace) -> EncodedTrace:
    ran = jnp.arange(trace.tokens.shape[0]) < trace.steps
    return jnp.where(ran[:, None], 2 * trace.tokens + trace.committed, -1)


def decode(
    encoded: Int[np.ndarray, "capacity head"],
) -> tuple[Int[np.ndarray, "steps head"], Bool[np.ndarray, "steps head"]]:
    """(`tokens`, `committed`) of the steps that ran."""
    ran = encoded[: np.count_nonzero(encoded[:, 0] >= 0)]
    return ran >> 1, (ran & 1) != 0


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
