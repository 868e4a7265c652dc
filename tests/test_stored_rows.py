"""Keys and values in floats of 8 bits against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jdllm.stored_rows import Float8Rows, as_read, as_stored, rows_at
from tests.rounding import rounded_as_stored

F32 = jnp.dtype("float32")
ROWS = arrays(np.float32, (3, 2, 16), elements=st.floats(-1e9, 1e9, width=32))


def some(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Heads of very different sizes, a head of zeros among them."""
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=shape) * np.exp2(rng.integers(-30, 30, (*shape[:-1], 1)))).astype(np.float32)
    rows[0, 0] = 0
    return rows


@settings(max_examples=30)
@given(ROWS)
def test_numbers_are_those_of_numpy(rows: np.ndarray):
    np.testing.assert_array_equal(Float8Rows.of(jnp.asarray(rows)).wide(F32), rounded_as_stored(rows))


@settings(max_examples=30)
@given(ROWS)
def test_numbers_are_near(rows: np.ndarray):
    """Half a step of three bits, or half of the least number that 8 bits have beside the largest."""
    error = np.abs(np.asarray(Float8Rows.of(jnp.asarray(rows)).wide(F32)) - rows)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    assert (error <= np.maximum(np.abs(rows) / 16, largest / 224 / 2**10) + 1e-32).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_widening_is_exact_and_rounding_again_changes_nothing(dtype: str):
    rows = Float8Rows.of(jnp.asarray(some((64, 4, 32))))
    wide = rows.wide(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(wide, np.float32), rows.wide(F32))
    np.testing.assert_array_equal(Float8Rows.of(wide).wide(F32), rows.wide(F32))


def test_a_head_of_a_row_is_rounded_alone():
    rows = some((3, 2, 16))
    whole = Float8Rows.of(jnp.asarray(rows)).wide(F32)
    for row, head in np.ndindex(3, 2):
        np.testing.assert_array_equal(Float8Rows.of(jnp.asarray(rows[row, head])).wide(F32), whole[row, head])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none(wrong: float):
    rows = some((4, 2, 16))
    rows[2, 1, 5] = wrong
    found = np.isnan(Float8Rows.of(jnp.asarray(rows)).wide(F32))
    assert found[2, 1].any()
    assert found.sum() == found[2, 1].sum()


@pytest.mark.parametrize("stored_as", ["float16", "fp8"])
def test_rows_are_read_as_they_were_stored(stored_as: str):
    rows = np.clip(some((10, 2, 16)), -1e4, 1e4)
    pool: Any = jnp.zeros((3, 10, 2, 16), jnp.float16)
    expected = rows.astype(np.float16).astype(np.float32)
    if stored_as == "fp8":
        pool, expected = Float8Rows.of(pool), rounded_as_stored(rows).astype(ml_dtypes.bfloat16)
    written = jax.tree.map(lambda x, new: x.at[1].set(new), pool, as_stored(pool, jnp.asarray(rows)))
    found = rows_at(written, (1, np.array([4, 7])), jnp.dtype("bfloat16"))
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected[[4, 7]].astype(np.float32))
    assert not np.asarray(rows_at(written, 2, F32), np.float32).any()
    # The rows of the evaluation that stores them see the same, where they are stored.
    stored = np.arange(10)[:, None] < 5
    seen = as_read(pool, jnp.asarray(rows), stored=jnp.asarray(stored))
    unchanged = rows if stored_as == "float16" else np.where(stored[..., None], rounded_as_stored(rows), rows)
    np.testing.assert_array_equal(seen, unchanged.astype(np.float32))
