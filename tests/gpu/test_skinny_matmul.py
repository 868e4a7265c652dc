"""Products of a few rows on a card against exact f32. The implementation is always named."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdllm.pallas.skinny_matmul import skinny_matmul
from jdllm.pallas.skinny_matmul.mosaic_gpu import skinny_matmul_mosaic_gpu
from jdllm.pallas.skinny_matmul.tiles import Tiles
from tests.pallas.rotation import turned

pytestmark = pytest.mark.gpu

LAYERS, LAYER, MOST_ROWS = 2, 1, 64
PRODUCTS = {
    "llada-qkv": ((4096, 4096, 4096), 4096, False),
    "llada-o": ((4096,), 4096, False),
    "llada-gate_up": ((12288, 12288), 4096, True),
    "llada-down": ((4096,), 12288, False),
    "dream-qkv": ((3584, 512, 512), 3584, False),
    "dream-gate_up": ((18944, 18944), 3584, True),
    "dream-down": ((3584,), 18944, False),
}


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


@functools.partial(jax.jit, static_argnames=("rows", "outputs", "k", "dtype"))
def operands(
    rows: int, outputs: tuple[int, ...], k: int, dtype=jnp.bfloat16
) -> tuple[jax.Array, list[jax.Array]]:
    keys = jax.random.split(jax.random.key(rows), 1 + len(outputs))
    shapes = [(LAYERS, n, k) for n in outputs]
    x = jax.random.normal(keys[0], (rows, k), dtype)
    weights = zip(keys[1:], shapes, strict=True)
    return x, [jax.random.normal(key, shape, dtype) * dtype(k**-0.5) for key, shape in weights]


@functools.partial(jax.jit, static_argnames="gated")
def exact_products(
    x: jax.Array, stacks: Sequence[jax.Array], bias: jax.Array | None, *, gated: bool
) -> list[jax.Array]:
    exact = [
        jnp.matmul(x.astype(jnp.float32), w[LAYER].astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
        for w in stacks
    ]
    if gated:
        exact = [jax.nn.silu(exact[0]) * exact[1]]
    if bias is not None:
        ends = np.cumsum([w.shape[1] for w in stacks])[:-1]
        exact = [y + b for y, b in zip(exact, jnp.split(bias[LAYER], ends), strict=True)]
    return exact


def check(
    actual: Sequence[jax.Array],
    x: jax.Array,
    stacks: Sequence[jax.Array],
    gated: bool = False,
    bias: jax.Array | None = None,
) -> None:
    """`actual` are products of the first rows of `x`."""
    exact = exact_products(x, stacks, bias, gated=gated)
    for product, expected in zip(actual, exact, strict=True):
        check_close(product, expected[: len(product)], 6e-3 if gated else 3e-3)


def check_close(actual: Any, expected: Any, tolerance: float = 3e-3) -> None:
    a, b = (np.asarray(v, np.float64) for v in (actual, expected))
    assert np.linalg.norm(a - b) < tolerance * np.linalg.norm(b)
    assert np.abs(a - b).max() < 0.03 * np.abs(b).max()


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("rows", [32, 8, MOST_ROWS, 13])
@pytest.mark.parametrize("product", PRODUCTS)
def test_model_shapes(product: str, rows: int, implementation: Any):
    outputs, k, gated = PRODUCTS[product]
    x, stacks = operands(MOST_ROWS, outputs, k)  # as many for all, so that they are compiled once
    run = jax.jit(
        lambda x, stacks, layer: skinny_matmul(
            x, stacks, layer=layer, gated=gated, implementation=implementation
        )
    )
    check(run(x[:rows], stacks, jnp.int32(LAYER)), x, stacks, gated)


@pytest.mark.parametrize(
    ("weights", "gated", "tiles"),
    [
        (1, False, Tiles(256, 1, 4)),
        (1, False, Tiles(192, 6, 5)),
        (1, False, Tiles(112, 5, 3)),
        (3, False, Tiles(96, 3, 3)),
        (3, False, Tiles(16, 1, 20)),
        (2, True, Tiles(160, 1, 3)),
        (2, True, Tiles(48, 1, 8)),
    ],
)
def test_cuts(weights: int, gated: bool, tiles: Tiles):
    """Columns beyond the weights, which the next layer would hold, and parts of unequal length."""
    x, stacks = operands(32, (1040,) * weights, 4160)
    run = jax.jit(
        lambda x, stacks, layer: skinny_matmul_mosaic_gpu(x, stacks, layer=layer, gated=gated, tiles=tiles)
    )
    check(run(x, stacks, jnp.int32(LAYER)), x, stacks, gated)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_a_bias(implementation: Any):
    outputs, k, _ = PRODUCTS["dream-qkv"]
    x, stacks = operands(32, outputs, k)
    bias = jax.random.normal(jax.random.key(1), (LAYERS, sum(outputs)), x.dtype)
    actual = skinny_matmul(x, stacks, layer=LAYER, bias=bias, implementation=implementation)
    check(actual, x, stacks, bias=bias)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize(("product", "biased"), [("llada-qkv", False), ("dream-qkv", True)])
def test_rotated_queries_and_keys(product: str, biased: bool, implementation: Any):
    outputs, k, _ = PRODUCTS[product]
    x, stacks = operands(32, outputs, k)
    bias = jax.random.normal(jax.random.key(1), (LAYERS, sum(outputs)), x.dtype) if biased else None
    angles = jax.random.uniform(jax.random.key(2), (32, 64), maxval=6)
    rotation = jnp.cos(angles), jnp.sin(angles)
    run = jax.jit(functools.partial(skinny_matmul, layer=LAYER, implementation=implementation))
    *rotated, values = run(x, stacks, bias=bias, rotation=rotation)
    *pairs, exact_values = exact_products(x, stacks, bias, gated=False)
    check_close(values, exact_values)
    for actual, exact in zip(rotated, pairs, strict=True):
        check_close(actual, turned(exact, angles))


@pytest.mark.parametrize("gated", [False, True])
def test_float16(gated: bool):
    x, stacks = operands(32, (4096,) * 2, 4096, jnp.float16)
    check(skinny_matmul(x, stacks, layer=LAYER, gated=gated, implementation="mosaic_gpu"), x, stacks, gated)


@pytest.mark.parametrize("product", ["llada-down", "llada-gate_up"])
def test_many_calls_in_a_row_agree_bit_by_bit(product: str):
    """What a race would spoil now and then; the order of sums does not depend on timing."""
    outputs, k, gated = PRODUCTS[product]
    x, stacks = operands(32, outputs, k)
    run = jax.jit(lambda x, stacks: skinny_matmul_mosaic_gpu(x, stacks, layer=LAYER, gated=gated))
    (first,) = run(x, stacks)
    for _ in range(50):
        np.testing.assert_array_equal(first, run(x, stacks)[0])
