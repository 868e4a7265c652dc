"""Grouped products with matrices in few bits in Triton against float64, in Triton's interpreter."""

import importlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.device import Target
from jdllm.pallas.grouped_matmul.limits import check_few_bits_triton, operator_for
from jdllm.pallas.triton_launch import ProductSizes, Schedule
from jdllm.quantised import WeightForm
from tests.few_bits import drawn_matrices
from tests.pallas.test_grouped_matmul import oracle
from tests.pallas.test_grouped_matmul_few_bits import ALL_GROUPS, FIRST, stack
from tests.pallas.triton_interpreter import interpreted

K, N = 256, 72
SIZES = np.array([21, 0, 3, 14], np.int32)


@pytest.fixture(scope="module")
def form() -> Iterator[Any]:
    """The module of the form, whose kernel is interpreted."""
    for _ in interpreted("grouped_matmul"):  # of whose module both forms have their launch
        yield importlib.import_module("jdllm.pallas.grouped_matmul.few_bits_triton")


def check(form: Any, bits: WeightForm, sizes: np.ndarray, gated: bool, dtype: Any, cut: Any) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (sizes.sum(), K)), dtype)
    (weights, exact), (gates, exact_gates) = (stack(bits, seed, N, K) for seed in range(2))
    found = form.grouped_matmul_few_bits_triton(
        x, weights, jnp.asarray(sizes), jnp.int32(FIRST), gates if gated else None, sizes=cut
    )
    assert found.dtype == dtype
    # The interpreter drops the bits that bfloat16 does not have.
    eps, expected, atol = float(jnp.finfo(dtype).eps), oracle(x, exact.swapaxes(1, 2), sizes, FIRST), 1e-9
    if gated:
        gate = oracle(x, exact_gates.swapaxes(1, 2), sizes, FIRST)
        atol = eps * np.abs(expected).max()  # where a silu is small, it multiplies the rounding of its gate
        expected *= gate / (1 + np.exp(-gate))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=4 * eps, atol=atol)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("gated", [False, True])
def test_each_row_meets_the_matrix_of_its_group(form: Any, bits: WeightForm, dtype: Any, gated: bool):
    """The last columns are no whole block."""
    check(form, bits, SIZES, gated, dtype, ProductSizes(16, 64, 64, Schedule(4, 2)))


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("sizes", [[0, 0, 40, 0], [0, 0, 0, 1], [1, 1, 6, 9]])
def test_skewed_and_tiny_groups(form: Any, bits: WeightForm, sizes: list[int]):
    check(form, bits, np.array(sizes, np.int32), False, jnp.float16, None)


class TestLimits:
    def test_what_the_kernel_cannot_take(self):
        x, (weights, _) = jnp.ones((8, K), jnp.bfloat16), stack("int8", 0, N, K)
        for operands, said in (
            ((x.astype(jnp.int8), weights, None), "not of int8"),
            ((x, stack("fp8", 0, N, K)[0], None), "takes no floats of 8 bits"),
            ((x, drawn_matrices("uint4", (ALL_GROUPS, N, K), 0)[0], None), "no groups with offsets"),
            ((x, stack("int8", 0, N, 192)[0], None), "multiples of 128, not 192 and 72 outputs"),
            ((x, weights, stack("int4", 0, N, K)[0]), "not Grouped .* and Quantised"),
        ):
            with pytest.raises(NotImplementedError, match=said):
                check_few_bits_triton(*operands)

    def test_where_it_runs(self):
        x, (weights, _) = jnp.ones((8, K), jnp.bfloat16), stack("int4", 0, 64, K)
        for device, expected in (
            (Target(True, 8.0), "triton"),
            (Target(True, 9.0), "mosaic_gpu"),
            (Target(True, 9.0, kernels="triton"), "triton"),
            (Target(True, 9.0, kernels="xla"), "padded"),
        ):
            assert operator_for(weights).default(device, x, weights, None).name == expected
