import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.pallas.grouped_matmul import Implementation, grouped_matmul
from tests.pallas.jaxprs import largest_intermediate

ROWS, GROUPS, ALL_GROUPS, K, N = 300, 5, 8, 24, 40
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((ROWS, K), np.float32))
WEIGHTS = jnp.asarray(RNG.standard_normal((ALL_GROUPS, K, N), np.float32))
FORMS: list[Implementation] = ["padded", "reference"]


@functools.cache
def compiled(form: Implementation):
    """Sizes and the first group are traced: one executable for all examples."""
    return jax.jit(
        lambda x, sizes, first: grouped_matmul(x, WEIGHTS, sizes, first_group=first, implementation=form)
    )


def oracle(x: jax.Array, weights: jax.Array, sizes: np.ndarray, first: int = 0) -> np.ndarray:
    x64, weights64 = (np.asarray(value).astype(np.float64) for value in (x, weights))
    group = first + np.repeat(np.arange(len(sizes)), sizes)
    return np.stack([row @ weights64[g] for row, g in zip(x64, group, strict=True)])


@st.composite
def group_sizes(draw) -> np.ndarray:
    """Skewed ones included: cuts fall together at the ends, and groups between equal cuts are empty."""
    cut = st.one_of(st.integers(0, ROWS), st.sampled_from([0, 1, 127, 128, 129, 256, ROWS]))
    cuts = sorted(draw(st.lists(cut, min_size=GROUPS - 1, max_size=GROUPS - 1)))
    return np.diff([0, *cuts, ROWS]).astype(np.int32)


@pytest.mark.parametrize("form", FORMS)
@given(sizes=group_sizes(), first=st.integers(0, ALL_GROUPS - GROUPS))
def test_each_row_meets_the_matrix_of_its_group(form, sizes, first):
    actual = compiled(form)(X, sizes, first)
    np.testing.assert_allclose(actual, oracle(X, WEIGHTS, sizes, first), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_products_are_rounded_once(form, dtype):
    x, weights = (jnp.asarray(value, dtype) for value in (X, WEIGHTS))
    sizes = np.array([0, 290, 0, 9, 1], np.int32)
    actual = grouped_matmul(x, weights, sizes, implementation=form)
    assert actual.dtype == dtype
    exact = oracle(x, weights, sizes)
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=jnp.finfo(dtype).eps, atol=1e-3)


def test_a_row_does_not_depend_on_the_others():
    """The same rows in groups of other sizes, and with other rows: the same bits."""
    sizes = np.array([100, 0, 150, 30, 20], np.int32)
    whole = np.asarray(compiled("padded")(X, sizes, 0))
    kept = np.r_[40:100, 110:113, 279:300]
    some = np.array([60, 0, 3, 1, 20], np.int32)
    part = grouped_matmul(X[kept], WEIGHTS, some, implementation="padded")
    np.testing.assert_array_equal(part, whole[kept])


def test_the_portable_form_has_no_array_of_rows_times_groups():
    rows, groups, k, n = 65536, 64, 2048, 1024
    x, weights = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, k), (16 * groups, k, n)))
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    padded = functools.partial(grouped_matmul, implementation="padded", first_group=3 * groups)
    assert largest_intermediate(padded, x, weights, sizes) == rows * n
    dense = functools.partial(grouped_matmul, implementation="reference", first_group=3 * groups)
    assert largest_intermediate(dense, x, weights, sizes) == rows * groups * n


# The choice of a form

SIZES = np.array([0, 290, 0, 9, 1], np.int32)


@pytest.fixture
def no_tokamax(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)


@pytest.fixture
def calls(monkeypatch) -> list:
    """A tokamax that multiplies by the oracle and notes what it was asked."""
    noted = []

    def ragged_dot(lhs, rhs, group_sizes, *, implementation, preferred_element_type):
        noted.append((implementation, np.asarray(group_sizes)))
        return jnp.asarray(oracle(lhs, rhs, np.asarray(group_sizes)), preferred_element_type)

    module = types.ModuleType("tokamax")
    setattr(module, "ragged_dot", ragged_dot)  # noqa: B010
    monkeypatch.setitem(sys.modules, "tokamax", module)
    return noted


def test_tokamax_gets_the_groups_of_other_layers_as_empty_ones(calls):
    x, weights = jnp.asarray(X, jnp.bfloat16), jnp.asarray(WEIGHTS, jnp.bfloat16)
    by_default = grouped_matmul(x, weights, SIZES, first_group=jnp.int32(2), platform="cuda")
    asked = grouped_matmul(x, weights, SIZES, first_group=2, implementation="tokamax", platform="gpu")
    for implementation, sizes in calls:
        assert implementation == "mosaic"
        np.testing.assert_array_equal(sizes, [0, 0, *SIZES, 0])
    assert len(calls) == 2
    expected = grouped_matmul(x, weights, SIZES, first_group=2, implementation="reference")
    for actual in (by_default, asked):
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(actual, float), np.asarray(expected, float), rtol=0.01)


def test_without_tokamax_the_portable_form_warns_on_cuda(no_tokamax):
    x, weights = jnp.asarray(X, jnp.bfloat16), jnp.asarray(WEIGHTS, jnp.bfloat16)
    with pytest.warns(UserWarning, match="slow, portable form.*'kernels'"):
        actual = grouped_matmul(x, weights, SIZES, platform="cuda")
    np.testing.assert_array_equal(actual, grouped_matmul(x, weights, SIZES, implementation="padded"))


def test_wide_types_take_the_portable_form_on_cuda(calls):
    with pytest.warns(UserWarning, match="bfloat16 and float16 only, not of float32"):
        grouped_matmul(X, WEIGHTS, SIZES, platform="cuda")
    assert not calls


def test_elsewhere_the_portable_form_is_no_surprise(calls):
    actual = grouped_matmul(X, WEIGHTS, SIZES, platform="cpu")
    np.testing.assert_array_equal(actual, grouped_matmul(X, WEIGHTS, SIZES, implementation="padded"))
    assert not calls


@pytest.mark.parametrize(
    ("platform", "dtype", "limit"),
    [
        ("cpu", "bfloat16", "on CUDA only"),
        ("cuda", "float32", "not of float32"),
        ("cuda", "bfloat16", "extra 'kernels'"),
    ],
)
def test_an_explicit_choice_that_cannot_run_names_its_limit(no_tokamax, platform, dtype, limit):
    x, weights = jnp.asarray(X, dtype), jnp.asarray(WEIGHTS, dtype)
    with pytest.raises(NotImplementedError, match=limit):
        grouped_matmul(x, weights, SIZES, implementation="tokamax", platform=platform)
