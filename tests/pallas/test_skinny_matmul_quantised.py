"""Products of a few rows with weights of 8 bits against float64: the portable form, and the Hopper kernel
in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.skinny_matmul import skinny_matmul
from jdllm.pallas.skinny_matmul.limits import check_mosaic_gpu, check_triton
from jdllm.pallas.skinny_matmul.mosaic_gpu import skinny_matmul_mosaic_gpu, skinny_parts_mosaic_gpu
from jdllm.pallas.skinny_matmul.tiles import Tiles
from jdllm.quantised import Quantised, out_of_order
from tests.pallas.rotation import turned

LAYERS, LAYER, K = 3, 1, 5 * 128

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def cut(columns: int, splits: int, stages: int, turns: int = 1) -> Tiles:
    return Tiles(columns, splits, stages, 1, turns)


def operands(
    outputs: tuple[int, ...], rows: int = 13, dtype=jnp.bfloat16
) -> tuple[jax.Array, list[Quantised], list[np.ndarray]]:
    """Rows, weights, and the exact products of the rows with `LAYER`'s.

    Sums are exact in f32. Each row has another scale, and other layers have scales that no test expects.
    """
    rng = np.random.default_rng(sum(outputs))
    x = jnp.asarray(rng.integers(-1, 2, (rows, K)), dtype)
    weights, exact = [], []
    for n in outputs:
        values = rng.integers(-128, 128, (LAYERS, n, K))
        scales = 2.0 ** rng.integers(-9, -6, (LAYERS, n)) * rng.integers(1, 4, (LAYERS, n))
        scales[np.arange(LAYERS) != LAYER] = np.nan
        stored = out_of_order(jnp.asarray(values, jnp.int8))
        weights.append(Quantised(stored, jnp.asarray(scales, jnp.float32)))
        exact.append(np.asarray(x, np.float64) @ (values[LAYER] * scales[LAYER][:, None]).T)
    return x, weights, exact


def check(actual: tuple[jax.Array, ...], exact: list[np.ndarray], roundings: float = 0.5) -> None:
    """Within so many roundings of the type of the results."""
    for product, expected in zip(actual, exact, strict=True):
        rtol = roundings * float(jnp.finfo(product.dtype).eps)
        np.testing.assert_allclose(np.asarray(product, np.float64), expected, rtol=rtol, atol=1e-6)


def gated(exact: list[np.ndarray]) -> list[np.ndarray]:
    gate, up = exact
    return [gate / (1 + np.exp(-gate)) * up]


@pytest.mark.usefixtures("interpreted")
class TestKernel:
    @pytest.mark.parametrize(
        ("outputs", "tiles"),
        [
            ((80,), cut(80, 5, 1)),
            slow((80,), cut(32, 2, 2)),
            ((80,), cut(48, 1, 4, turns=2)),  # of five steps one warpgroup has three; strips are three
            slow((80,), cut(32, 2, 4, turns=4)),  # of two steps two warpgroups have none
            slow((64, 32), cut(32, 1, 2)),
            ((48, 16, 80), cut(48, 1, 3)),  # the last block of each has columns beyond it
            slow((160,), cut(160, 1, 2)),
            slow((48, 16, 80), None),
        ],
    )
    def test_cuts(self, outputs: tuple[int, ...], tiles: Tiles | None):
        x, weights, exact = operands(outputs)
        check(skinny_matmul_mosaic_gpu(x, weights, layer=LAYER, chained=True, tiles=tiles), exact)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
    @pytest.mark.parametrize("tiles", [cut(48, 1, 3), slow(None)])
    def test_gated(self, tiles: Tiles | None, dtype):
        x, weights, exact = operands((80, 80), rows=20, dtype=dtype)
        actual = skinny_matmul_mosaic_gpu(x, weights, layer=LAYER, gated=True, tiles=tiles)
        check(actual, gated(exact), roundings=40)  # an error of the gate grows with its size

    @pytest.mark.parametrize("biased", [slow(False), True])
    def test_rotated(self, biased: bool):
        x, weights, exact = operands((256, 64, 64))
        bias = np.random.default_rng(1).integers(-9, 10, (LAYERS, 384)) * biased
        exact = [y + b for y, b in zip(exact, np.split(bias[LAYER], [256, 320]), strict=True)]
        angles = jnp.asarray(np.random.default_rng(0).uniform(0, 6, (len(x), 32)), jnp.float32)
        actual = skinny_matmul_mosaic_gpu(
            x,
            weights,
            layer=LAYER,
            bias=jnp.asarray(bias, x.dtype) if biased else None,
            rotation=(jnp.cos(angles), jnp.sin(angles)),
            tiles=cut(32, 1, 2),
        )
        for index, product in enumerate(actual):
            expected = turned(exact[index], angles * (index < 2))
            error = np.abs(np.asarray(product, np.float64) - expected).max()
            assert error < 2 * float(jnp.finfo(x.dtype).eps) * np.abs(expected).max()

    @pytest.mark.parametrize("splits", [1, 2])
    def test_sums_in_parts(self, splits: int):
        x, (weight,), (exact,) = operands((64,))
        parts = skinny_parts_mosaic_gpu(x, weight, layer=LAYER, chained=True, tiles=cut(32, splits, 2))
        assert (len(parts), parts.dtype) == (splits, jnp.float32 if splits > 1 else x.dtype)
        check((functools.reduce(jnp.add, parts),), [exact])


class TestPortable:
    @pytest.mark.parametrize(("dtype", "roundings"), [(jnp.float32, 8), (jnp.bfloat16, 60)])
    def test_products(self, dtype, roundings: float):
        """A matrix is rounded to 16 bits before the product, whose terms partly cancel."""
        x, weights, exact = operands((24, 40), dtype=dtype)
        actual = skinny_matmul(x, weights, layer=LAYER, implementation="xla")
        for product, expected in zip(actual, exact, strict=True):
            assert product.dtype == dtype
            error = np.linalg.norm(np.asarray(product, np.float64) - expected)
            assert error < roundings * float(jnp.finfo(dtype).eps) / 32 * np.linalg.norm(expected)


class TestRefusals:
    def test_sides(self):
        x, weights, _ = operands((24,))
        with pytest.raises(NotImplementedError, match="multiples of 16 and 128, not 24 and 640"):
            check_mosaic_gpu(x, weights)

    def test_quantised_beside_others(self):
        x, weights, _ = operands((32,))
        with pytest.raises(NotImplementedError, match="all quantised, or none"):
            check_mosaic_gpu(x, [*weights, jnp.ones((LAYERS, 32, K), x.dtype)])

    def test_triton(self):
        x, weights, _ = operands((32,))
        with pytest.raises(NotImplementedError, match="no quantised weights"):
            check_triton(x, weights)
