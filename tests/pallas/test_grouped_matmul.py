import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.pallas.grouped_matmul import Implementation, grouped_matmul
from jdllm.quantised import KINDS
from tests.few_bits import drawn_matrices
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


def oracle(x: Any, weights: Any, sizes: np.ndarray, first: int = 0) -> np.ndarray:
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", KINDS)
def test_matrices_in_few_bits_are_what_the_numbers_stand_for(form, bits):
    """`[outputs, inputs]`, also those of gates; in 4 bits a row has two groups of inputs."""
    k, first, sizes = 160, 2, np.array([0, 140, 100, 59, 1], np.int32)
    x = np.random.default_rng(1).integers(-2, 3, (ROWS, k)).astype(np.float32)
    (gate, gates), (weights, ups) = (drawn_matrices(bits, (ALL_GROUPS, N, k), seed) for seed in range(2))
    actual = grouped_matmul(
        jnp.asarray(x), weights, jnp.asarray(sizes), first_group=first, gate=gate, implementation=form
    )
    gates, ups = (oracle(x, exact.swapaxes(1, 2), sizes, first) for exact in (gates, ups))
    np.testing.assert_allclose(actual, gates / (1 + np.exp(-gates)) * ups, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float32", "not of float32"), ("bfloat16", f"not {K} and {N}")]
)
def test_what_the_kernel_cannot_take_is_multiplied_portably_on_cuda(dtype, limit):
    x, weights = jnp.asarray(X, dtype), jnp.asarray(WEIGHTS, dtype)
    with pytest.warns(UserWarning, match=f"slow, portable form.*{limit}"):
        actual = grouped_matmul(x, weights, SIZES, platform="cuda")
    np.testing.assert_array_equal(actual, grouped_matmul(x, weights, SIZES, implementation="padded"))


def test_elsewhere_the_portable_form_is_no_surprise():
    actual = grouped_matmul(X, WEIGHTS, SIZES, platform="cpu")
    np.testing.assert_array_equal(actual, grouped_matmul(X, WEIGHTS, SIZES, implementation="padded"))


@pytest.mark.parametrize(
    ("implementation", "platform", "limit"),
    [
        ("mosaic_gpu", "cpu", "on Hopper only"),
        ("mosaic_gpu", "cuda", "not of float32"),
        ("tokamax", "cuda", "no implementation 'tokamax'"),
    ],
)
def test_an_explicit_choice_that_cannot_run_names_its_limit(implementation, platform, limit):
    with pytest.raises(NotImplementedError, match=limit):
        grouped_matmul(X, WEIGHTS, SIZES, implementation=implementation, platform=platform)
