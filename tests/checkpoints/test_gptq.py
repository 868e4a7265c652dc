"""Rounding of one matrix by GPTQ, against GPTQ in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.checkpoints.calibration.gptq import compensated, feedback, following
from jdllm.quantised import WeightForm
from tests.rounding import following_by_numpy, rounded_by_gptq, rounded_to_4_bits, rounded_to_8_bits

FORMS = pytest.mark.parametrize("form", ["int8", "int4"])
SIZES = pytest.mark.parametrize("inputs", [64, 320])
NEAREST = {"int8": rounded_to_8_bits, "int4": rounded_to_4_bits}


def drawn(inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix with heavy tails, and rows that are correlated: each is a sum of few directions, and noise."""
    rng = np.random.default_rng(inputs)
    directions = rng.normal(size=(inputs // 8, inputs)) * np.exp(rng.normal(size=inputs))
    rows = rng.normal(size=(2000, inputs // 8)) @ directions + 0.3 * rng.normal(size=(2000, inputs))
    return rng.standard_t(4, size=(48, inputs)).astype(np.float32), rows.astype(np.float32)


def by_gptq(
    matrix: np.ndarray, rows: np.ndarray, form: WeightForm
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, scales, and the matrix that they stand for."""
    numbers, scales = map(np.asarray, compensated(matrix, feedback(jnp.asarray(rows.T @ rows)), form))
    return numbers, scales, widened(numbers, scales)


def widened(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    wide = scales[:, None] if scales.ndim == 1 else scales.repeat(128, axis=1)[:, : numbers.shape[1]]
    return numbers * wide


def error(rows: np.ndarray, matrix: np.ndarray, other: np.ndarray) -> float:
    return float(((rows @ (matrix - other).T) ** 2).sum())


@FORMS
@SIZES
def test_numbers_are_those_of_float64(form: WeightForm, inputs: int):
    """But for a few rows, where a tie of float32 is none in float64."""
    matrix, rows = drawn(inputs)
    numbers, scales, _ = by_gptq(matrix, rows, form)
    expected, expected_scales = rounded_by_gptq(matrix, rows, form)
    assert (numbers == expected).mean() > 0.99
    assert np.isclose(scales, expected_scales, rtol=1e-3).mean() > 0.98


@FORMS
@SIZES
def test_products_with_other_rows_of_the_kind_have_smaller_errors(form: WeightForm, inputs: int):
    matrix, rows = drawn(inputs)
    *_, found = by_gptq(matrix, rows[:1000], form)
    nearest = NEAREST[form](matrix)
    assert error(rows[1000:], matrix, found) < 0.7 * error(rows[1000:], matrix, nearest)
    assert np.abs(found - matrix).mean() > np.abs(nearest - matrix).mean()


@FORMS
def test_columns_of_large_inputs_first_make_smaller_errors_than_columns_as_they_stand(form: WeightForm):
    """With the largest inputs at the end of a row, where few columns are left to make errors good."""
    matrix, rows = drawn(320)
    rows = rows[:, np.argsort(rows.std(axis=0))]
    *_, found = by_gptq(matrix, rows, form)
    as_they_stand = widened(*rounded_by_gptq(matrix, rows, form, in_order=True))
    assert error(rows, matrix, found) < 0.5 * error(rows, matrix, as_they_stand)


def test_a_matrix_follows_rows_that_drift():
    """The drift is a function of the rows, and noise."""
    matrix, rows = drawn(320)
    rng = np.random.default_rng(1)
    others = rows + rows @ rng.normal(size=(320, 320)).astype(np.float32) / 200
    others += rng.normal(size=rows.shape).astype(np.float32) / 20
    found = following(matrix, jnp.asarray((others - rows).T @ rows), feedback(jnp.asarray(rows.T @ rows)))
    np.testing.assert_allclose(found, following_by_numpy(matrix, rows, others), rtol=1e-3, atol=1e-3)
    ideal, before, after = others @ matrix.T, rows @ matrix.T, rows @ np.asarray(found).T
    assert np.square(after - ideal).sum() < 0.5 * np.square(before - ideal).sum()


@FORMS
def test_without_inputs_the_nearest_numbers_are_taken(form: WeightForm):
    """But for a few groups of 4 bits, of which two scales are as good."""
    matrix, rows = drawn(320)
    *_, found = by_gptq(matrix, np.zeros_like(rows), form)
    assert np.isclose(found, NEAREST[form](matrix), rtol=1e-5).mean() > (0.97 if form == "int4" else 0.999)


@FORMS
def test_a_row_of_zeros_stays_so(form: WeightForm):
    matrix, rows = drawn(64)
    matrix[3] = 0
    *_, found = by_gptq(matrix, rows, form)
    assert np.isfinite(found).all()
    assert not found[3].any()
