"""Products of a few rows with weights of few bits on a card, against exact f32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.skinny_matmul import skinny_matmul, skinny_parts
from jdllm.quantised import FLOAT8, KINDS, Quantised, WeightForm
from tests.gpu.test_skinny_matmul import (
    LAYER,
    LAYERS,
    MOST_ROWS,
    PRODUCTS,
    check,
    check_close,
    exact_products,
    operands,
)
from tests.pallas.rotation import turned

pytestmark = pytest.mark.gpu


@pytest.fixture(params=KINDS)
def form(request: pytest.FixtureRequest) -> WeightForm:
    return request.param


def quantised_operands(
    form: WeightForm, rows: int, product: str
) -> tuple[jax.Array, list[Quantised], list[jax.Array]]:
    """Rows, weights, and the matrices that the weights stand for, in f32."""
    outputs, k, _ = PRODUCTS[product]
    x, stacks = operands(rows, outputs, k)
    weights = [KINDS[form].of(stack) for stack in stacks]
    return x, weights, [weight.dequantised(jnp.dtype("float32")) for weight in weights]


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_model_shapes(product: str, implementation: Any, form: WeightForm):
    gated = PRODUCTS[product][2]
    x, weights, exact = quantised_operands(form, MOST_ROWS, product)
    run = jax.jit(
        lambda x, weights, layer: skinny_matmul(
            x, weights, layer=layer, gated=gated, implementation=implementation
        )
    )
    for rows in (32, 8, MOST_ROWS, 13):
        check(run(x[:rows], weights, jnp.int32(LAYER)), x, exact, gated)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_all_floats_of_8_bits(dtype: Any):
    """Each row asks for one input, and each column has all floats."""
    floats = np.arange(256, dtype=np.uint8).view(FLOAT8)
    values = np.resize(np.where(np.isfinite(floats), floats, 0), (1, 128, 256)).astype(FLOAT8)
    weight = KINDS["fp8"].of_stored(jnp.asarray(values), jnp.ones((1, 128), jnp.float32))
    for first in range(0, 256, MOST_ROWS):
        x = jnp.eye(MOST_ROWS, 256, first, dtype)
        (found,) = skinny_matmul(x, [weight], layer=0, implementation="mosaic_gpu")
        np.testing.assert_array_equal(found, values[0].T[first : first + MOST_ROWS].astype(dtype))


@pytest.mark.parametrize("product", ["llada-down", "llada-o"])
def test_sums_in_parts(product: str, form: WeightForm):
    x, [weight], exact = quantised_operands(form, 32, product)
    parts = jax.jit(skinny_parts, static_argnames="layer")(x, weight, layer=LAYER)
    assert len(parts) > 1
    check_close(jnp.sum(parts, axis=0), exact_products(x, exact, None, gated=False)[0])


@pytest.mark.parametrize("product", ["llada-qkv", "dream-qkv"])
def test_rotated_queries_and_keys(product: str, form: WeightForm):
    x, weights, exact = quantised_operands(form, 32, product)
    outputs, _, _ = PRODUCTS[product]
    bias = jax.random.normal(jax.random.key(1), (LAYERS, sum(outputs)), x.dtype)
    angles = jax.random.uniform(jax.random.key(2), (32, 64), maxval=6)
    actual = skinny_matmul(
        x,
        weights,
        layer=LAYER,
        bias=bias,
        rotation=(jnp.cos(angles), jnp.sin(angles)),
        implementation="mosaic_gpu",
    )
    for index, expected in enumerate(exact_products(x, exact, bias, gated=False)):
        check_close(actual[index], turned(expected, angles * (index < 2)))


@pytest.mark.parametrize("product", ["llada-down", "llada-gate_up"])
def test_many_calls_in_a_row_agree_bit_by_bit(product: str, form: WeightForm):
    x, weights, _ = quantised_operands(form, 32, product)
    gated = PRODUCTS[product][2]
    run = jax.jit(lambda x, weights: skinny_matmul(x, weights, layer=LAYER, gated=gated))
    (first,) = run(x, weights)
    for _ in range(50):
        np.testing.assert_array_equal(first, run(x, weights)[0])
