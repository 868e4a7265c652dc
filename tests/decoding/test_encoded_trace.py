"""Traces as one array, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.batch import Trace
from jdllm.decoding.encoded_trace import decode, encode, encoding

TOKENS = jnp.array([[0, 126_463, 5], [7, 0, 2**30 - 1], [9, 9, 9]], jnp.int32)
COMMITTED = jnp.array([[False, True, False], [True, True, True], [True, False, True]])


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_the_steps_that_ran_come_back(steps: int):
    tokens, committed = decode(np.asarray(jax.jit(encode)(Trace(jnp.int32(steps), TOKENS, COMMITTED))))
    assert tokens.dtype == np.int32
    assert committed.dtype == bool
    np.testing.assert_array_equal(tokens, TOKENS[:steps])
    np.testing.assert_array_equal(committed, COMMITTED[:steps])


def test_traces_among_results_are_encoded():
    def function(x: jax.Array, *, steps: int) -> tuple[Trace, dict[str, jax.Array]]:
        return Trace(jnp.int32(steps), TOKENS, COMMITTED), {"x": x}

    encoded, rest = encoding(function)(jnp.arange(2), steps=2)
    np.testing.assert_array_equal(encoded, encode(Trace(jnp.int32(2), TOKENS, COMMITTED)))
    np.testing.assert_array_equal(rest["x"], [0, 1])
