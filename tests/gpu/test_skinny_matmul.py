"""Products of a few rows on a card against exact f32. The implementation is always named."""

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

pytestmark = pytest.mark.gpu

LAYERS, LAYER = 2, 1
PRODUCTS = {
    "llada-qkv": (4096, 4096, 3, False),
    "llada-o": (4096, 4096, 1, False),
    "llada-gate_up": (12288, 4096, 2, True),
    "llada-down": (4096, 12288, 1, False),
    "dream-q": (3584, 3584, 1, False),
    "dream-kv": (512, 3584, 2, False),
    "dream-gate_up": (18944, 3584, 2, True),
    "dream-down": (3584, 18944, 1, False),
}


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


def operands(
    rows: int, n: int, k: int, weights: int, dtype=jnp.bfloat16
) -> tuple[jax.Array, list[jax.Array]]:
    keys = jax.random.split(jax.random.key(rows), 1 + weights)
    x = jax.random.normal(keys[0], (rows, k), dtype)
    return x, [jax.random.normal(key, (LAYERS, n, k), dtype) * dtype(k**-0.5) for key in keys[1:]]


def check(
    actual: Sequence[jax.Array], x: jax.Array, stacks: Sequence[jax.Array], gated: bool = False
) -> None:
    exact = [
        jnp.matmul(x.astype(jnp.float32), w[LAYER].astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
        for w in stacks
    ]
    if gated:
        exact = [jax.nn.silu(exact[0]) * exact[1]]
    for product, expected in zip(actual, exact, strict=True):
        a, b = (np.asarray(v, np.float64) for v in (product, expected))
        assert np.linalg.norm(a - b) < (6e-3 if gated else 3e-3) * np.linalg.norm(b)
        assert np.abs(a - b).max() < 0.03 * np.abs(b).max()


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("rows", [32, 8, 64, 13])
@pytest.mark.parametrize("product", PRODUCTS)
def test_model_shapes(product: str, rows: int, implementation: Any):
    n, k, weights, gated = PRODUCTS[product]
    x, stacks = operands(rows, n, k, weights)
    run = jax.jit(
        lambda x, stacks, layer: skinny_matmul(
            x, stacks, layer=layer, gated=gated, implementation=implementation
        )
    )
    check(run(x, stacks, jnp.int32(LAYER)), x, stacks, gated)


@pytest.mark.parametrize(
    ("weights", "gated", "tiles"),
    [
        (1, False, Tiles(256, 1, 4)),
        (1, False, Tiles(192, 6, 5)),
        (1, False, Tiles(112, 5, 3)),
        (3, False, Tiles(96, 3, 3)),
        (3, False, Tiles(16, 1, 15)),
        (2, True, Tiles(160, 1, 3)),
        (2, True, Tiles(48, 1, 8)),
    ],
)
def test_cuts(weights: int, gated: bool, tiles: Tiles):
    """Columns beyond the weights, which the next layer would hold, and parts of unequal length."""
    x, stacks = operands(32, 1040, 4160, weights)
    run = jax.jit(
        lambda x, stacks, layer: skinny_matmul_mosaic_gpu(x, stacks, layer=layer, gated=gated, tiles=tiles)
    )
    check(run(x, stacks, jnp.int32(LAYER)), x, stacks, gated)


@pytest.mark.parametrize("gated", [False, True])
def test_float16(gated: bool):
    x, stacks = operands(32, 4096, 4096, 2, jnp.float16)
    check(skinny_matmul(x, stacks, layer=LAYER, gated=gated, implementation="mosaic_gpu"), x, stacks, gated)


@pytest.mark.parametrize("product", ["llada-down", "llada-gate_up"])
def test_many_calls_in_a_row_agree_bit_by_bit(product: str):
    """What a race would spoil now and then; the order of sums does not depend on timing."""
    n, k, weights, gated = PRODUCTS[product]
    x, stacks = operands(32, n, k, weights)
    run = jax.jit(lambda x, stacks: skinny_matmul_mosaic_gpu(x, stacks, layer=LAYER, gated=gated))
    (first,) = run(x, stacks)
    for _ in range(50):
        np.testing.assert_array_equal(first, run(x, stacks)[0])
