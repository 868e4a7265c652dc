"""Grouped products with matrices in few bits on Hopper against float64, in interpret mode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.device import Target
from jdllm.pallas.grouped_matmul.few_bits_mosaic_gpu import grouped_matmul_few_bits_mosaic_gpu
from jdllm.pallas.grouped_matmul.limits import check_few_bits_mosaic_gpu, operator_for
from jdllm.pallas.quantised_matmul.tiles import Tiles, default_tiles
from jdllm.quantised import KINDS, Quantised, WeightForm
from tests.few_bits import OF_EXPERTS, drawn_matrices
from tests.helpers import slow

K, N, ALL_GROUPS, FIRST = 256, 128, 7, 2
SIZES = np.array([67, 0, 3, 90], np.int32)
ROWS = int(SIZES.sum())


@pytest.fixture(params=[slow("int8"), "int4", slow("fp8")])
def form(request: pytest.FixtureRequest) -> WeightForm:
    return request.param


def stack(form: WeightForm, seed: int, n: int = N, k: int = K) -> tuple[Quantised, np.ndarray]:
    """Matrices of all groups; those of groups that no call has are not finite."""
    matrices, exact = drawn_matrices(form, (ALL_GROUPS, n, k), seed)
    used = np.isin(np.arange(ALL_GROUPS), FIRST + np.arange(len(SIZES)))
    scales = jnp.where(used.reshape(-1, *[1] * (matrices.scales.ndim - 1)), matrices.scales, jnp.nan)
    return dataclasses.replace(matrices, scales=scales), exact


def check(form: WeightForm, sizes: np.ndarray, cut: tuple[int, int, int] | None, gated: bool, dtype) -> None:
    """Sums are exact, so that a product is rounded once; of a gated one the silu is rounded too."""
    x = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (sizes.sum(), K)), dtype)
    (weights, exact), (gates, exact_gates) = (stack(form, seed) for seed in range(2))
    tiles = cut and Tiles(*cut, KINDS[form].bits, processors=4, matrices=1 + gated)
    actual = grouped_matmul_few_bits_mosaic_gpu(
        x, weights, jnp.asarray(sizes), jnp.int32(FIRST), gates if gated else None, tiles=tiles
    )
    assert actual.dtype == dtype
    group, x64 = FIRST + np.repeat(np.arange(len(sizes)), sizes), np.asarray(x, np.float64)
    expected, eps = np.einsum("rk,rnk->rn", x64, exact[group]), float(jnp.finfo(dtype).eps)
    if not gated:
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=eps / 2)
        return
    gate = np.einsum("rk,rnk->rn", x64, exact_gates[group]).astype(dtype).astype(np.float64)
    up = expected.astype(dtype).astype(np.float64)
    # The smallest silus have fewer bits.
    atol = float(jnp.finfo(dtype).smallest_subnormal) * np.abs(up).max()
    expected = up * gate / (1 + np.exp(-gate))
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=1.01 * eps, atol=atol)


@pytest.mark.usefixtures("interpreted")
class TestKernel:
    @pytest.mark.parametrize(
        ("cut", "gated"),
        [
            ((64, 1, 2), True),
            slow((64, 2, 1), False),
            slow((128, 1, 2), False),  # chunks without a row of the group take their turns
            slow((128, 1, 1), True),
            slow((192, 1, 1), False),
        ],
    )
    def test_each_row_meets_the_matrix_of_its_group(self, cut: tuple[int, int, int], gated: bool, form):
        check(form, SIZES, cut, gated, jnp.bfloat16)

    @pytest.mark.slow
    @pytest.mark.parametrize("gated", [False, True])
    def test_defaults(self, gated: bool, form: WeightForm):
        check(form, SIZES, None, gated, jnp.float16)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "sizes", [[0, 0, 150, 0], [0, 0, 0, 1], [1, 1, 6, 9], [7, 64, 1, 0], [63, 65, 0, 129]]
    )
    def test_skewed_and_tiny_groups(self, sizes: list[int]):
        check("int8", np.array(sizes, np.int32), (64, 1, 2), False, jnp.bfloat16)

    @pytest.mark.slow
    def test_a_row_does_not_depend_on_the_others(self, form: WeightForm):
        """The same rows in groups of other sizes, and at other places of a tile: the same bits."""
        x = jnp.asarray(np.random.default_rng(0).standard_normal((150, K)), jnp.bfloat16)
        weights, _ = stack(form, 0)
        tiles = Tiles(64, 1, 2, weights.bits, processors=4)

        def run(x: jax.Array, sizes: list[int]) -> np.ndarray:
            y = grouped_matmul_few_bits_mosaic_gpu(x, weights, jnp.asarray(sizes), FIRST, tiles=tiles)
            return np.asarray(y)

        kept = np.r_[75:80, 83:86, 149]
        np.testing.assert_array_equal(run(x[kept], [5, 0, 4]), run(x, [80, 0, 70])[kept])


@pytest.mark.parametrize(("rows", "groups"), [(0, 4), (7, 0)])
def test_nothing_to_multiply(rows: int, groups: int):
    x, (weights, _) = jnp.ones((rows, K), jnp.bfloat16), stack("int8", 0)
    out = grouped_matmul_few_bits_mosaic_gpu(x, weights, jnp.zeros(groups, jnp.int32), 0)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.zeros((rows, N)))


class TestCuts:
    @pytest.mark.parametrize("rows", [1, 256, 8192, 131072])
    @pytest.mark.parametrize(("n", "k", "matrices"), [(1024, 2048, 2), (2048, 1024, 1), (64, 128, 2)])
    def test_defaults_fit(self, rows: int, n: int, k: int, matrices: int):
        for kind in KINDS.values():
            tiles = default_tiles(rows, n, k, kind.bits, groups=64, matrices=matrices)
            assert (tiles.matrices, n % (tiles.cluster * tiles.columns)) == (matrices, 0)
            assert tiles.stages >= 3

    def test_groups_of_few_rows_have_small_blocks(self):
        assert default_tiles(256, 1024, 2048, 8, groups=64, matrices=2).rows == 64
        assert default_tiles(131072, 1024, 2048, 8, groups=64, matrices=2).rows == 128
        assert default_tiles(131072, 2048, 1024, 8, groups=64).rows == 256

    def test_refusals(self):
        with pytest.raises(NotImplementedError, match=r"\(128, 64\) rows .* not \(192, 2, 1\)"):
            Tiles(192, 2, 1, 8, matrices=2)
        x, (weights, _) = jnp.ones((8, K), jnp.bfloat16), stack("int8", 0)
        for tiles in (Tiles(64, 2, 2, 8), Tiles(64, 2, 1, 8, matrices=2)):
            with pytest.raises(NotImplementedError, match="do not divide 128 columns of 1"):
                grouped_matmul_few_bits_mosaic_gpu(x, weights, jnp.asarray([8]), 0, tiles=tiles)


class TestLimits:
    def test_what_the_kernel_cannot_take(self):
        x, (weights, _) = jnp.ones((8, K), jnp.bfloat16), stack("int8", 0)
        for operands, said in (
            ((x.astype(jnp.float32), weights, None), "not of float32"),
            ((x, stack("int8", 0, n=96)[0], None), "multiples of 64, not 256 and 96"),
            ((x, stack("int8", 0, k=192)[0], None), "multiples of 128 and outputs .*, not 192 and 128"),
            ((x, weights, stack("fp8", 0)[0]), "not Float8 .* and Quantised"),
            ((x, drawn_matrices("uint4", (ALL_GROUPS, N, K), 0)[0], None), "no groups with offsets"),
        ):
            with pytest.raises(NotImplementedError, match=said):
                check_few_bits_mosaic_gpu(*operands)

    def test_the_form_on_hopper(self):
        hopper = Target(on_cuda=True, capability=9.0)
        for kind in OF_EXPERTS:
            weights, _ = stack(kind, 0)
            in_f32 = "padded" if kind == "fp8" else "triton"
            for dtype, expected in ((jnp.bfloat16, "mosaic_gpu"), (jnp.float32, in_f32)):
                x = jnp.ones((8, K), dtype)
                assert operator_for(weights).default(hopper, x, weights, weights).name == expected
        shifted, _ = drawn_matrices("uint4", (ALL_GROUPS, N, K), 0)
        assert operator_for(shifted).default(hopper, x, shifted, shifted).name == "padded"
