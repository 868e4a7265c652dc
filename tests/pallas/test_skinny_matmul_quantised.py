"""Products of a few rows with weights of few bits against float64: the portable form, and the Hopper kernel
in interpret mode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.device import Target
from jdllm.pallas.skinny_matmul import skinny_matmul
from jdllm.pallas.skinny_matmul.limits import SKINNY_MATMUL, check_mosaic_gpu, check_triton
from jdllm.pallas.skinny_matmul.mosaic_gpu import skinny_matmul_mosaic_gpu, skinny_parts_mosaic_gpu
from jdllm.pallas.skinny_matmul.tiles import Tiles
from jdllm.quantised import KINDS, Quantised, WeightForm
from tests.few_bits import drawn_matrices, of_one_layer
from tests.pallas.rotation import turned

LAYERS, LAYER, K = 3, 1, 5 * 128

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def cut(columns: int, splits: int, stages: int, turns: int = 1) -> Tiles:
    return Tiles(columns, splits, stages, 8, turns)


def of_form(tiles: Tiles | None, form: WeightForm) -> Tiles | None:
    if tiles is None:
        return None
    return dataclasses.replace(tiles, bits=KINDS[form].bits, shifted=form == "uint4")


@pytest.fixture(params=["int8", "int4", slow("uint4"), slow("fp8")])
def form(request: pytest.FixtureRequest) -> WeightForm:
    return request.param


def operands(
    form: WeightForm, outputs: tuple[int, ...], rows: int = 13, dtype=jnp.bfloat16
) -> tuple[jax.Array, list[Quantised], list[np.ndarray]]:
    """Rows, weights, and the exact products of the rows with `LAYER`'s.

    Sums are exact in f32. Other layers are not numbers.
    """
    x = jnp.asarray(np.random.default_rng(sum(outputs)).integers(-1, 2, (rows, K)), dtype)
    weights, exact = [], []
    for index, n in enumerate(outputs):
        weight, matrices = drawn_matrices(form, (LAYERS, n, K), index)
        weights.append(of_one_layer(weight, LAYER))
        exact.append(np.asarray(x, np.float64) @ matrices[LAYER].T)
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
            ((96,), cut(64, 5, 1)),
            slow((96,), cut(32, 2, 2)),
            ((128,), cut(96, 1, 4, turns=2)),  # of five steps one warpgroup has three; strips are six
            slow((96,), cut(32, 2, 4, turns=4)),  # of two steps two warpgroups have none
            slow((64, 32), cut(32, 1, 2)),
            ((64, 32, 96), cut(64, 1, 3)),  # the last block of each has columns beyond it
            slow((160,), cut(160, 1, 2)),
            slow((64, 32, 96), None),
        ],
    )
    def test_cuts(self, outputs: tuple[int, ...], tiles: Tiles | None, form: WeightForm):
        x, weights, exact = operands(form, outputs)
        tiles = of_form(tiles, form)
        check(skinny_matmul_mosaic_gpu(x, weights, layer=LAYER, chained=True, tiles=tiles), exact)

    @pytest.mark.parametrize(
        ("outputs", "tiles"), [((80,), cut(48, 1, 4, turns=2)), slow((48, 16, 80), cut(48, 1, 3))]
    )
    def test_cuts_of_an_odd_number_of_strips(self, outputs: tuple[int, ...], tiles: Tiles):
        x, weights, exact = operands("int8", outputs)
        check(skinny_matmul_mosaic_gpu(x, weights, layer=LAYER, tiles=tiles), exact)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
    @pytest.mark.parametrize("tiles", [cut(64, 1, 3), slow(None)])
    def test_gated(self, tiles: Tiles | None, dtype, form: WeightForm):
        x, weights, exact = operands(form, (96, 96), rows=20, dtype=dtype)
        tiles = of_form(tiles, form)
        actual = skinny_matmul_mosaic_gpu(x, weights, layer=LAYER, gated=True, tiles=tiles)
        check(actual, gated(exact), roundings=40)  # an error of the gate grows with its size

    @pytest.mark.parametrize("columns", [96, slow(32)])
    def test_offsets_of_both_weights(self, columns: int):
        """A warpgroup has columns of the first weight, and of the second one."""
        x, weights, exact = operands("uint4", (96, 96), rows=20)
        tiles = of_form(cut(columns, 1, 3), "uint4")
        actual = skinny_matmul_mosaic_gpu(x, weights, layer=LAYER, gated=True, tiles=tiles)
        check(actual, gated(exact), roundings=40)

    @pytest.mark.parametrize("biased", [slow(False), True])
    def test_rotated(self, biased: bool, form: WeightForm):
        x, weights, exact = operands(form, (256, 64, 64))
        bias = np.random.default_rng(1).integers(-9, 10, (LAYERS, 384)) * biased
        exact = [y + b for y, b in zip(exact, np.split(bias[LAYER], [256, 320]), strict=True)]
        angles = jnp.asarray(np.random.default_rng(0).uniform(0, 6, (len(x), 32)), jnp.float32)
        actual = skinny_matmul_mosaic_gpu(
            x,
            weights,
            layer=LAYER,
            bias=jnp.asarray(bias, x.dtype) if biased else None,
            rotation=(jnp.cos(angles), jnp.sin(angles)),
            tiles=of_form(cut(64 if KINDS[form].bits == 4 else 32, 1, 2), form),
        )
        for index, product in enumerate(actual):
            expected = turned(exact[index], angles * (index < 2))
            error = np.abs(np.asarray(product, np.float64) - expected).max()
            assert error < 2 * float(jnp.finfo(x.dtype).eps) * np.abs(expected).max()

    @pytest.mark.parametrize("splits", [1, 2])
    def test_sums_in_parts(self, splits: int, form: WeightForm):
        x, (weight,), (exact,) = operands(form, (64,))
        tiles = of_form(cut(32, splits, 2), form)
        parts = skinny_parts_mosaic_gpu(x, weight, layer=LAYER, chained=True, tiles=tiles)
        assert (len(parts), parts.dtype) == (splits, jnp.float32 if splits > 1 else x.dtype)
        check((functools.reduce(jnp.add, parts),), [exact])


class TestPortable:
    @pytest.mark.parametrize(("dtype", "roundings"), [(jnp.float32, 8), (jnp.bfloat16, 60)])
    def test_products(self, dtype, roundings: float, form: WeightForm):
        """A matrix is rounded to 16 bits before the product, whose terms partly cancel."""
        x, weights, exact = operands(form, (24, 40), dtype=dtype)
        actual = skinny_matmul(x, weights, layer=LAYER, implementation="xla")
        for product, expected in zip(actual, exact, strict=True):
            assert product.dtype == dtype
            error = np.linalg.norm(np.asarray(product, np.float64) - expected)
            assert error < roundings * float(jnp.finfo(dtype).eps) / 32 * np.linalg.norm(expected)


class TestChoice:
    @pytest.mark.parametrize("form", ["int4", "uint4"])
    def test_only_hopper_has_a_kernel_for_few_bits(self, form: WeightForm):
        x, weights, _ = operands(form, (64, 32))
        for capability, expected in ((9.0, "mosaic_gpu"), (8.0, "xla")):
            assert SKINNY_MATMUL.default(Target(True, capability), x, weights).name == expected


class TestRefusals:
    @pytest.mark.parametrize(("form", "unit", "heads"), [("int8", 16, 32), ("int4", 32, 64)])
    def test_sides(self, form: WeightForm, unit: int, heads: int):
        x, weights, _ = operands(form, (unit // 2,))
        with pytest.raises(NotImplementedError, match=f"of {unit} and 128, not {unit // 2} and 640"):
            check_mosaic_gpu(x, weights)
        x, weights, _ = operands(form, (unit,))
        with pytest.raises(NotImplementedError, match=f"heads of multiples of {heads}, not of {heads // 2}"):
            check_mosaic_gpu(x, weights, heads // 2)

    def test_cuts(self):
        with pytest.raises(NotImplementedError, match="multiple of 32 columns, at most 256, not 48"):
            Tiles(48, 1, 2, bits=4)
        with pytest.raises(
            NotImplementedError, match="multiple of 64 columns that divides the 128 of a head"
        ):
            Tiles(32, 1, 2, bits=4).check(8, [256], 256, head_dim=128)

    def test_quantised_beside_others(self):
        x, weights, _ = operands("int8", (32,))
        grouped, shifted = (operands(form, (32,))[1][0] for form in ("int4", "uint4"))
        for unlike in (
            [*weights, grouped],
            [grouped, shifted],
            [*weights, jnp.ones((LAYERS, 32, K), x.dtype)],
        ):
            with pytest.raises(NotImplementedError, match="all quantised alike, or none"):
                check_mosaic_gpu(x, unlike)

    def test_triton(self, form: WeightForm):
        x, weights, _ = operands(form, (32,))
        with pytest.raises(NotImplementedError, match="no quantised weights"):
            check_triton(x, weights)
