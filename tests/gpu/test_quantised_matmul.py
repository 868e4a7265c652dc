"""Products of many rows with matrices in few bits on a card, against exact f32.

The last test is of XLA's products."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.quantised_matmul import quantised_matmul
from jdllm.pallas.quantised_matmul.mosaic_gpu import quantised_matmul_mosaic_gpu
from jdllm.pallas.quantised_matmul.tiles import BLOCK_ROWS, CLUSTERS, CONSUMERS, Tiles
from jdllm.quantised import WeightForm, rounded_to_float8
from tests.gpu.test_skinny_matmul import LAYER, check_close, exact_products
from tests.gpu.test_skinny_matmul_quantised import quantised_operands

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["int8", "int4", "uint4"])
def form(request: pytest.FixtureRequest) -> WeightForm:
    return request.param


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
@pytest.mark.parametrize("product", ["llada-qkv", "llada-down", "dream-qkv", "dream-down"])
@pytest.mark.parametrize("rows", [512, 100, 1100])
def test_model_shapes(rows: int, product: str, implementation: Any, form: WeightForm):
    x, weights, exact = quantised_operands(form, rows, product)
    run = jax.jit(lambda x, w, layer: quantised_matmul(x, w, layer=layer, implementation=implementation))
    for weight, expected in zip(weights, exact_products(x, exact, None, gated=False), strict=True):
        check_close(run(x, weight, jnp.int32(LAYER)), expected, 4e-3)


@pytest.mark.parametrize("rows", BLOCK_ROWS)
@pytest.mark.parametrize("consumers", CONSUMERS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_cuts(rows: int, consumers: int, cluster: int, form: WeightForm):
    x, [weight], exact = quantised_operands(form, 512, "llada-o")
    tiles = Tiles(rows, consumers, cluster, weight.bits, shifted=form == "uint4")
    run = jax.jit(lambda x, weight: quantised_matmul_mosaic_gpu(x, weight, layer=LAYER, tiles=tiles))
    check_close(run(x, weight), exact_products(x, exact, None, gated=False)[0], 4e-3)


def test_many_calls_in_a_row_agree_bit_by_bit(form: WeightForm):
    x, [weight], _ = quantised_operands(form, 512, "llada-down")
    run = jax.jit(lambda x, weight: quantised_matmul(x, weight, layer=LAYER, implementation="mosaic_gpu"))
    first = run(x, weight)
    for _ in range(50):
        np.testing.assert_array_equal(first, run(x, weight))


@pytest.mark.parametrize("product", ["llada-o", "dream-down"])
def test_floats_of_8_bits(product: str):
    x, [weight], exact = quantised_operands("fp8", 512, product)
    values, scales = rounded_to_float8(x)
    rows = values.astype(jnp.float32) * scales[:, None]
    found = jax.jit(lambda x, weight: quantised_matmul(x, weight, layer=LAYER))(x, weight)
    check_close(found, exact_products(rows, exact, None, gated=False)[0], 6e-3)
