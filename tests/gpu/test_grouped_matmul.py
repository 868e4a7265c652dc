"""The Hopper form of grouped products at LLaDA-MoE's shapes against f32, group by group, on a card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.pallas.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu
from jdllm.pallas.grouped_matmul.tiles import Tiles

pytestmark = pytest.mark.gpu

GROUPS, FIRST = 64, 64
SIDES = [(2048, 1024), (1024, 2048)]
ROUNDING = 2.0**-8
"""Of bfloat16; half of it is a product's own."""

mosaic_gpu = functools.partial(grouped_matmul, first_group=FIRST, implementation="mosaic_gpu")


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


def balanced(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).multinomial(rows, [1 / GROUPS] * GROUPS).astype(np.int32)


def skewed(rows: int) -> np.ndarray:
    """Half of the rows in one group, some groups empty, some of a single row, the rest of odd sizes."""
    rng = np.random.default_rng(rows)
    sizes = rng.multinomial(rows // 2 - 16, rng.dirichlet(np.full(GROUPS, 0.3)))
    sizes[rng.permutation(GROUPS)[:16]] += 1
    sizes[17] += rows - sizes.sum()
    assert (sizes == 0).any()
    return sizes.astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw(rows: int, k: int, n: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(rows + k), 3)
    x = jax.random.normal(keys[0], (rows, k), jnp.bfloat16)
    scale = jnp.bfloat16(k**-0.5)
    weights, gate = (jax.random.normal(key, (2 * GROUPS, k, n), jnp.bfloat16) * scale for key in keys[1:])
    return x, weights, gate


@functools.partial(jax.jit, static_argnames="size")
def _group_product(x: jax.Array, matrix: jax.Array, first: jax.Array, size: int) -> jax.Array:
    part = lax.dynamic_slice_in_dim(x, first, size).astype(jnp.float32)
    return jnp.matmul(part, matrix.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def exact(x: jax.Array, weights: jax.Array, sizes: np.ndarray) -> np.ndarray:
    """Products in f32, one group after the other; slices are padded, so that few sizes are compiled."""
    firsts = np.cumsum(sizes) - sizes
    padded_sizes = [max(64, 1 << int(size - 1).bit_length()) for size in sizes]
    padded = jnp.pad(x, ((0, max(padded_sizes)), (0, 0)))
    parts = []
    for group, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
        if size:
            product = _group_product(padded, weights[FIRST + group], jnp.int32(first), padded_sizes[group])
            parts.append(np.asarray(product)[:size])
    return np.concatenate(parts)


def rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(jnp.bfloat16).astype(np.float32)


def check(actual: jax.Array, expected: np.ndarray, tolerance: float = ROUNDING) -> None:
    assert actual.dtype == jnp.bfloat16
    got = np.asarray(actual, np.float32)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * 2e-2)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < ROUNDING / 2


@pytest.mark.parametrize(("k", "n"), SIDES)
@pytest.mark.parametrize(
    "sizes",
    [balanced(8192), skewed(8192), balanced(32768), skewed(32768)],
    ids=lambda s: f"{s.sum()}-{s[17]}",
)
def test_products(sizes: np.ndarray, k: int, n: int):
    x, weights, _ = draw(int(sizes.sum()), k, n)
    actual = jax.jit(mosaic_gpu)(x, weights, jnp.asarray(sizes))
    check(actual, exact(x, weights, sizes))


@pytest.mark.parametrize("sizes", [balanced(8192), skewed(32768)], ids=lambda s: f"{s.sum()}-{s[17]}")
def test_gated_products(sizes: np.ndarray):
    x, weights, gate = draw(int(sizes.sum()), *SIDES[0])
    actual = jax.jit(mosaic_gpu)(x, weights, jnp.asarray(sizes), gate=gate)
    gates, up = (rounded(exact(x, w, sizes)) for w in (gate, weights))
    # Products next to a tie round either way, and where silu is small it multiplies a gate's rounding by 5.
    check(actual, rounded(gates / (1 + np.exp(-gates))) * up, 8 * ROUNDING)


@pytest.mark.parametrize(
    "cut",
    [
        (1, 256, 2, 1, 2, 1, 4),
        (1, 256, 2, 1, 1, 2, 4),
        (1, 128, 3, 1, 1, 1, 4),
        (1, 128, 2, 2, 1, 1, 3),
        (1, 64, 1, 1, 1, 1, 2),
    ],
)
def test_other_cuts_change_no_bit(cut: tuple[int, ...]):
    sizes = skewed(8192)
    x, weights, _ = draw(8192, *SIDES[0])
    run = functools.partial(grouped_matmul_mosaic_gpu, x, weights, jnp.asarray(sizes), FIRST)
    np.testing.assert_array_equal(run(tiles=Tiles(*cut)), run())


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_the_others(gated: bool):
    """Every third row of some groups, at other places of a tile and beside others: the same bits."""
    sizes = skewed(8192)
    x, weights, gate = draw(8192, *SIDES[0])
    run = functools.partial(mosaic_gpu, weights=weights, gate=gate if gated else None)
    whole = np.asarray(run(x, group_sizes=jnp.asarray(sizes)))
    group = np.repeat(np.arange(GROUPS), sizes)
    kept = np.flatnonzero((np.arange(8192) % 3 == 0) & (group % 5 != 2))
    part = run(x[kept], group_sizes=jnp.asarray(np.bincount(group[kept], minlength=GROUPS), jnp.int32))
    np.testing.assert_array_equal(np.asarray(part), whole[kept])


def test_few_rows():
    """A step of a few tokens: most groups are empty."""
    sizes = np.zeros(GROUPS, np.int32)
    sizes[[3, 17, 18, 63]] = [1, 5, 9, 2]
    x, weights, _ = draw(17, *SIDES[0])
    check(mosaic_gpu(x, weights, jnp.asarray(sizes)), exact(x, weights, sizes))
