"""Traces as one array, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.batch import Trace
from jdllm.decoding.encoded_trace import decode, encode, encoding
from jdllm.pallas.masked_logits import Likeliest

TOKENS = np.array([[0, 126_463, 5], [7, 0, 2**30 - 1], [9, 9, 9]], np.int32)
COMMITTED = np.array([[False, True, False], [True, True, True], [True, False, True]])
LOGPROBS = np.array([[-0.0, -1e-30, np.nan], [-np.inf, -3.5, 0.0], [-1.0, -2.0, -3.0]], np.float32)


def trace(steps: int, tokens: np.ndarray = TOKENS) -> Trace:
    return Trace(jnp.int32(steps), jnp.asarray(tokens), jnp.asarray(COMMITTED), jnp.asarray(LOGPROBS), None)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_the_steps_that_ran_come_back(steps: int):
    tokens, committed, logprobs, likeliest = decode(jax.jit(encode)(trace(steps)))
    assert likeliest.shape == (steps, 3, 0)
    assert tokens.dtype == np.int32
    assert committed.dtype == bool
    assert logprobs.dtype == np.float32
    np.testing.assert_array_equal(tokens, TOKENS[:steps])
    np.testing.assert_array_equal(committed, COMMITTED[:steps])
    np.testing.assert_array_equal(logprobs.view(np.int32), LOGPROBS[:steps].view(np.int32))


@pytest.mark.parametrize("undefined", [-(2**31), -1, 2**31 - 1])
def test_steps_are_counted_by_the_device_and_not_by_what_rows_hold(undefined: int):
    poisoned = np.where(np.arange(3) == 0, np.int32(undefined), TOKENS)
    assert len(decode(encode(trace(2, poisoned))).tokens) == 2


@pytest.mark.parametrize("of_steps", [(), (3,)])
def test_what_is_listed_comes_back_once_or_for_every_step(of_steps: tuple[int, ...]):
    ids = np.arange(np.prod((*of_steps, 3, 4)), dtype=np.int32).reshape(*of_steps, 3, 4)
    values = (-0.5 * ids).astype(np.float32)
    listed = trace(2)._replace(likeliest=Likeliest(jnp.asarray(ids), jnp.asarray(values)))
    found = decode(jax.jit(encode)(listed)).likeliest
    assert found.shape == (2, 3, 4)
    for step in range(2):
        np.testing.assert_array_equal(found["id"][step], ids[step] if of_steps else ids)
        np.testing.assert_array_equal(found["logprob"][step], values[step] if of_steps else values)


def test_traces_among_results_are_encoded():
    def function(x: jax.Array, *, steps: int) -> tuple[Trace, dict[str, jax.Array]]:
        return trace(steps), {"x": x}

    encoded, rest = encoding(function)(jnp.arange(2), steps=2)
    np.testing.assert_array_equal(encoded.lines, encode(trace(2)).lines)
    np.testing.assert_array_equal(rest["x"], [0, 1])
