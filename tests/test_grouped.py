"""Matrices in 4 bits with scales of groups against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.models.leaf import some_outputs
from jdllm.quantised import (
    KINDS,
    Grouped,
    Quantised,
    packed,
    paired,
    rounded_in_groups,
    unpacked,
    unpaired,
)
from tests.rounding import rounded_in_groups_by_numpy

F32 = jnp.dtype("float32")


def drawn(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Numbers of which some are far from zero, as those of trained matrices."""
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def test_the_order_of_thirty_two():
    """Four words, of which the second has the inputs from 4 on. Pair `i` is the numbers `i` and `i + 4`."""
    numbers = np.arange(32) % 16 - 8
    for place in range(2):  # of the inputs, those that four bits tell apart
        values = np.full(32, -8)
        values[16 * place : 16 * place + 16] = numbers[:16]
        words = np.asarray(packed(jnp.asarray(values, jnp.int8))).view("<u4")
        for begin, word in zip((0, 4, 2, 6), words, strict=True):
            eight = [int(word) >> 4 * number & 15 for number in range(8)]
            for i in range(4):
                first = begin + 8 * i
                expected = [int(values[first + neighbour]) + 8 for neighbour in range(2)]
                assert [eight[i], eight[i + 4]] == expected


@pytest.mark.parametrize("shape", [(64,), (2, 3, 32), (5, 24), (3, 10)])
def test_packing_is_undone(shape: tuple[int, ...]):
    values = np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)
    for there, back in ((packed, unpacked), (paired, unpaired)):
        found = there(jnp.asarray(values))
        assert (found.dtype, found.shape) == (jnp.uint8, (*shape[:-1], shape[-1] // 2))
        np.testing.assert_array_equal(back(found), values)


@pytest.mark.parametrize("inputs", [128, 384, 160, 64])
def test_numbers_and_scales(inputs: int):
    matrix = drawn((40, inputs))
    values, scales = map(np.asarray, rounded_in_groups(jnp.asarray(matrix)))
    expected_values, expected_scales = rounded_in_groups_by_numpy(matrix)
    assert (values.min(), values.max()) == (-8, 7)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-6)


def test_errors_are_the_least_of_those_that_clipping_allows():
    matrix = drawn((200, 128)).astype(np.float64)
    found = np.asarray(Grouped.of(jnp.asarray(matrix)).dequantised(F32), np.float64)
    furthest = np.take_along_axis(matrix, np.abs(matrix).argmax(1)[:, None], 1)
    errors = []
    for factor in (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15):
        step = -factor * furthest / 8
        errors.append(((np.clip(np.rint(matrix / step), -8, 7) * step - matrix) ** 2).sum(1))
    assert (((found - matrix) ** 2).sum(1) <= np.min(errors, axis=0) * 1.002).all()
    assert len(set(np.argmin(errors, axis=0))) > 3


def test_groups_have_scales_of_their_own_and_zeros_stay():
    one = np.linspace(-1, 0.5, 128)
    matrix = np.concatenate([1e-3 * one, 0 * one, -1e3 * one])[None].astype(np.float32)
    kept = Grouped.of(jnp.asarray(matrix))
    assert (kept.shape, kept.scales.shape, kept.bits) == ((1, 384), (3, 1), 4)
    again = np.asarray(kept.dequantised(F32)).reshape(3, 128)
    assert not again[1].any()
    np.testing.assert_allclose(again[2] / -1e6, again[0], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS.values())
def test_some_of_the_outputs(kind: type[Quantised]):
    kept = kind.of(jnp.asarray(drawn((24, 256))))
    some = some_outputs(kept, jnp.int32(5), 8)
    assert isinstance(some, kind)
    np.testing.assert_array_equal(some.dequantised(F32), kept.dequantised(F32)[5:13])


def test_pieces_are_rounded_as_the_whole():
    matrix = drawn((3, 96, 512), seed=1)
    whole = jax.jit(rounded_in_groups)(matrix)
    for size in (1, 7, 96):
        pieces = [jax.jit(rounded_in_groups)(matrix[1, i : i + size]) for i in range(0, 96, size)]
        for found, expected in zip(zip(*pieces, strict=True), whole, strict=True):
            np.testing.assert_array_equal(np.concatenate(found), expected[1])
