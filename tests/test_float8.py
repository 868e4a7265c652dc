"""Matrices of floats of 8 bits against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.layers import linear
from jdllm.quantised import Float8, rounded_to_float8
from tests.rounding import rounded_to_floats_of_8_bits


def drawn(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers of which some are far from zero, as those of trained matrices, and a row of zeros."""
    numbers = np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)
    numbers[3] = 0
    return numbers


@pytest.mark.parametrize("inputs", [64, 90])
def test_numbers_and_scales(inputs: int):
    matrix = drawn((40, inputs), 0)
    values, scales = rounded_to_float8(jnp.asarray(matrix))
    assert (values.dtype, values.shape, scales.shape) == (jnp.float8_e4m3fn, (40, inputs), (40,))
    found = np.asarray(values, np.float32) * np.asarray(scales)[:, None]
    np.testing.assert_allclose(found, rounded_to_floats_of_8_bits(matrix), rtol=1e-6)
    np.testing.assert_array_equal(np.abs(np.asarray(values, np.float32)).max(axis=1), 448 * (scales > 0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("inputs", [64, 90])
def test_rows_of_16_bits_are_rounded_too(inputs: int, dtype):
    x, matrix = jnp.asarray(drawn((20, inputs), 1), dtype), drawn((40, inputs), 2)
    found = jax.jit(linear)(x, Float8.of(jnp.asarray(matrix)), jnp.ones(40, dtype))
    assert found.dtype == dtype
    rows = rounded_to_floats_of_8_bits(np.asarray(x, np.float32)).astype(np.float64)
    expected = rows @ rounded_to_floats_of_8_bits(matrix).T + 1
    # A sum is rounded, scaled, and rounded again.
    off = np.abs(np.asarray(found, np.float64) - expected)
    size = np.abs(rows) @ np.abs(rounded_to_floats_of_8_bits(matrix)).T + 1
    assert (off <= 2 * float(jnp.finfo(dtype).eps) * size).all()


def test_rows_of_32_bits_are_not():
    x, matrix = drawn((20, 64), 1), drawn((40, 64), 2)
    found = linear(jnp.asarray(x), Float8.of(jnp.asarray(matrix)))
    np.testing.assert_allclose(found, x @ rounded_to_floats_of_8_bits(matrix).T, rtol=1e-4, atol=1e-4)
