"""Matrices in few bits against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jdllm.quantised import Quantised, Shifted, in_order, out_of_order, unpacked
from tests.rounding import rounded_with_offsets_by_numpy


def test_the_order_of_sixteen():
    """A thread's four neighbours are two neighbours and their two neighbours eight further."""
    order = np.asarray(out_of_order(jnp.arange(16, dtype=jnp.int8)))
    assert order.tolist() == [0, 8, 1, 9, 4, 12, 5, 13, 2, 10, 3, 11, 6, 14, 7, 15]
    for first, third in zip(order[::4], order[1::4], strict=True):
        assert third == first + 8


@pytest.mark.parametrize("shape", [(48,), (2, 3, 32), (5, 24)])
def test_an_order_is_undone(shape: tuple[int, ...]):
    values = np.random.default_rng(0).integers(-128, 128, shape).astype(np.int8)
    np.testing.assert_array_equal(in_order(out_of_order(jnp.asarray(values))), values)


@given(arrays(np.float32, (3, 32), elements=st.floats(-1e6, 1e6, width=32)))
def test_numbers_are_within_half_a_step(matrix: np.ndarray):
    kept = Quantised.of(jnp.asarray(matrix))
    step = np.abs(matrix).max(axis=1, keepdims=True) / 127
    error = np.abs(np.asarray(kept.dequantised(jnp.dtype("float32"))) - matrix)
    assert (error <= 0.5001 * step + 1e-30).all()


def test_rows_have_scales_of_their_own_and_zeros_stay():
    matrix = np.outer([1e-3, 0, 1e3], np.linspace(-1, 1, 16)).astype(np.float32)
    kept = Quantised.of(jnp.asarray(matrix))
    np.testing.assert_allclose(kept.scales, np.abs(matrix).max(axis=1) / 127, rtol=1e-6)
    again = np.asarray(kept.dequantised(jnp.dtype("float32")))
    assert not again[1].any()
    np.testing.assert_allclose(again[2] / 1e6, again[0], rtol=1e-5)


def test_groups_of_32_have_scales_and_offsets():
    """Also when some rows are cut out."""
    draw = np.random.default_rng(0)
    values = draw.integers(-8, 8, (2, 6, 64))
    scales, offsets = (draw.normal(size=(2, 6, 2)).astype(jnp.bfloat16) for _ in range(2))
    matrix = Shifted.of_numbers(jnp.int8(values), jnp.asarray(scales), jnp.asarray(offsets))
    wide = [each.astype(np.float64).repeat(32, axis=-1) for each in (scales, offsets)]
    expected = values * wide[0] + wide[1]
    np.testing.assert_allclose(matrix.dequantised(jnp.dtype("float32")), expected, rtol=1e-6)
    some = matrix.some_outputs(2, 3).dequantised(jnp.dtype("float32"))
    np.testing.assert_allclose(some, expected[:, 2:5], rtol=1e-6)


def test_a_matrix_is_rounded_with_offsets():
    """Also in pieces; a group of zeros and a group of equal numbers stay what they are."""
    matrix = np.random.default_rng(0).standard_t(4, (40, 96)).astype(np.float32)
    matrix[3, :32], matrix[4, 32:64], matrix[5] = 0, 1.5, np.abs(matrix[5])
    kept = Shifted.of(jnp.asarray(matrix))
    assert isinstance(kept, Shifted)
    values, scales, offsets = rounded_with_offsets_by_numpy(matrix)
    np.testing.assert_array_equal(unpacked(kept.values), values)
    np.testing.assert_array_equal(kept.scales.T.astype(np.float32), scales)
    np.testing.assert_array_equal(kept.offsets.T.astype(np.float32), offsets)
    found = np.asarray(kept.dequantised(jnp.dtype("float32")))
    assert not found[3, :32].any()
    np.testing.assert_allclose(found[4, 32:64], 1.5, rtol=2**-8)
    pieces = [
        Shifted.of(jnp.asarray(piece)).dequantised(jnp.dtype("float32")) for piece in np.split(matrix, 8)
    ]
    np.testing.assert_array_equal(np.concatenate(pieces), found)
