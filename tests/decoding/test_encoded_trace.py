"""Traces as one array, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.batch import Trace
from jdllm.decoding.encoded_trace import decode, encode, encoding

TOKENS = np.array([[0, 126_463, 5], [7, 0, 2**30 - 1], [9, 9, 9]], np.int32)
COMMITTED = np.array([[False, True, False], [True, True, True], [True, False, True]])
LOGPROBS = np.array([[-0.0, -1e-30, np.nan], [-np.inf, -3.5, 0.0], [-1.0, -2.0, -3.0]], np.float32)


def trace(steps: int, tokens: np.ndarray = TOKENS) -> Trace:
    return Trace(jnp.int32(steps), jnp.asarray(tokens), jnp.asarray(COMMITTED), jnp.asarray(LOGPROBS))


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_the_steps_that_ran_come_back(steps: int):
    tokens, committed, logprobs = decode(np.asarray(jax.jit(encode)(trace(steps))))
    assert tokens.dtype == np.int32
    assert committed.dtype == bool
    assert logprobs.dtype == np.float32
    np.testing.assert_array_equal(tokens, TOKENS[:steps])
    np.testing.assert_array_equal(committed, COMMITTED[:steps])
    np.testing.assert_array_equal(logprobs.view(np.int32), LOGPROBS[:steps].view(np.int32))


@pytest.mark.parametrize("undefined", [-(2**31), -1, 2**31 - 1])
def test_steps_are_counted_by_the_device_and_not_by_what_rows_hold(undefined: int):
    poisoned = np.where(np.arange(3) == 0, np.int32(undefined), TOKENS)
    assert len(decode(np.asarray(encode(trace(2, poisoned)))).tokens) == 2


def test_traces_among_results_are_encoded():
    def function(x: jax.Array, *, steps: int) -> tuple[Trace, dict[str, jax.Array]]:
        return trace(steps), {"x": x}

    encoded, rest = encoding(function)(jnp.arange(2), steps=2)
    np.testing.assert_array_equal(encoded, encode(trace(2)))
    np.testing.assert_array_equal(rest["x"], [0, 1])
