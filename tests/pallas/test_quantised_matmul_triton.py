"""Products with matrices in few bits in Triton against float64, in Triton's interpreter, and their limits."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.device import Target
from jdllm.pallas.quantised_matmul.limits import MOST_ROWS, QUANTISED_MATMUL
from jdllm.pallas.triton_launch import ProductSizes, Schedule
from jdllm.quantised import Float8, WeightForm
from tests.pallas.test_quantised_matmul import LAYER, operands
from tests.pallas.triton_interpreter import interpreted

BITS: list[WeightForm] = ["int8", "int4", "uint4"]


@pytest.fixture(scope="module")
def form() -> Iterator[Any]:
    """The module of the form, whose kernel is interpreted."""
    yield from interpreted("quantised_matmul")


def cut(rows: int = 32, columns: int = 64, depth: int = 64) -> ProductSizes:
    return ProductSizes(rows, columns, depth, Schedule(4, 2))


def check(form: Any, bits: WeightForm, rows: int, n: int, dtype: Any, sizes: ProductSizes | None) -> None:
    x, weight, exact = operands(bits, rows, n, dtype)
    found = form.quantised_matmul_triton(x, weight, layer=jnp.int32(LAYER), sizes=sizes)
    assert found.dtype == dtype
    # The interpreter drops the bits that bfloat16 does not have.
    rtol = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(("rows", "n"), [(70, 80), (1, 64)])
def test_products(form: Any, bits: WeightForm, dtype: Any, rows: int, n: int):
    """The last blocks have rows and outputs that are not there."""
    check(form, bits, rows, n, dtype, cut())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("programs", [1, 10_000])
def test_parts_of_any_number(form: Any, monkeypatch: pytest.MonkeyPatch, bits: WeightForm, programs: int):
    monkeypatch.setattr("jdllm.pallas.skinny_matmul.triton.PROGRAMS", programs)
    check(form, bits, 20, 64, jnp.bfloat16, cut(columns=32, depth=32))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [16, 40, 130])
def test_defaults(form: Any, bits: WeightForm, rows: int):
    check(form, bits, rows, 96, jnp.bfloat16, None)


@pytest.mark.parametrize("capability", [8.0, 8.6, 9.0, 10.0, 12.0, 99.0])
def test_every_card_has_sizes_for_any_number_of_rows(form: Any, capability: float):
    for rows in (1, 16, 17, 64, 65, MOST_ROWS):
        for itemsize in (2, 4):
            assert form.sizes_for(rows, itemsize, capability).rows >= min(rows, 32)


class TestChoice:
    def names(self, device: Target, bits: WeightForm = "int4", rows: int = 8) -> str:
        x, weight, _ = operands(bits, rows, 64)
        return QUANTISED_MATMUL.default(device, x, weight).name

    def test_it_runs_where_it_is_the_only_kernel_or_preferred(self):
        assert self.names(Target(True, 8.0)) == "triton"
        assert self.names(Target(True, 9.0)) == "mosaic_gpu"
        assert self.names(Target(True, 9.0, kernels="triton")) == "triton"
        assert self.names(Target(True, 9.0, kernels="xla")) == "xla"
        assert self.names(Target(True, 7.5)) == "xla"

    def test_groups_with_offsets_have_both_kernels(self):
        assert self.names(Target(True, 8.0), "uint4") == "triton"
        assert self.names(Target(True, 9.0), "uint4") == "mosaic_gpu"

    def test_limits(self):
        assert self.names(Target(True, 8.0), rows=MOST_ROWS + 1) == "xla"
        x, _, _ = operands("int8", 8, 64)
        for weight in (Float8.of(jnp.ones((1, 64, 384))), operands("int8", 8, 64)[1]):
            found = QUANTISED_MATMUL.default(Target(True, 8.0), x[:, :200], weight).name
            assert found == ("xla" if isinstance(weight, Float8) else "triton")
