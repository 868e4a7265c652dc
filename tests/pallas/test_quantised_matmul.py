"""Products of many rows with matrices in few bits against float64: the portable form, and the Hopper kernel
in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.quantised_matmul import quantised_matmul
from jdllm.pallas.quantised_matmul.limits import MOST_ROWS, check_mosaic_gpu
from jdllm.pallas.quantised_matmul.mosaic_gpu import quantised_matmul_mosaic_gpu
from jdllm.pallas.quantised_matmul.tiles import Tiles, default_tiles
from jdllm.quantised import KINDS, Quantised, WeightForm
from tests.few_bits import drawn_matrices, of_one_layer

LAYERS, LAYER, K = 3, 1, 384

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(params=["int8", "int4", "uint4"])
def form(request: pytest.FixtureRequest) -> WeightForm:
    return request.param


def operands(
    form: WeightForm, rows: int, n: int, dtype=jnp.bfloat16
) -> tuple[jax.Array, Quantised, np.ndarray]:
    """Rows, a stack, and the exact products of the rows with the matrix of `LAYER`.

    Sums are exact in f32, and so are scaled weights of 4 bits in 16 bits. Other layers are not numbers.
    """
    x = jnp.asarray(np.random.default_rng(rows + n).integers(-1, 2, (rows, K)), dtype)
    weight, matrices = drawn_matrices(form, (LAYERS, n, K), rows + n)
    return x, of_one_layer(weight, LAYER), np.asarray(x, np.float64) @ matrices[LAYER].T


def check(actual: jax.Array, exact: np.ndarray) -> None:
    """Rounded once."""
    eps = float(jnp.finfo(actual.dtype).eps)
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=eps / 2, atol=1e-9)


@pytest.mark.usefixtures("interpreted")
class TestKernel:
    @pytest.mark.parametrize(
        ("rows", "n", "cut"),
        [
            (70, 128, (64, 1, 2)),  # the last block has rows that nobody asked for
            (192, 128, (192, 2, 1)),  # more chunks leave than there are slots
            slow(128, 256, (64, 2, 2)),
            slow(65, 64, (64, 1, 1)),
        ],
    )
    def test_cuts(self, rows: int, n: int, cut: tuple[int, int, int], form: WeightForm):
        x, weight, exact = operands(form, rows, n)
        tiles = Tiles(*cut, bits=weight.bits, processors=2, shifted=form == "uint4")
        check(quantised_matmul_mosaic_gpu(x, weight, layer=LAYER, tiles=tiles), exact)

    @pytest.mark.slow
    def test_defaults(self, form: WeightForm):
        x, weight, exact = operands(form, 100, 192, jnp.float16)
        check(quantised_matmul_mosaic_gpu(x, weight, layer=jnp.int32(LAYER)), exact)


class TestPortable:
    def test_products(self, form: WeightForm):
        x, weight, exact = operands(form, 65, 40, jnp.float32)
        check(quantised_matmul(x, weight, layer=LAYER, implementation="xla"), exact)


class TestCuts:
    @pytest.mark.parametrize("rows", [1, 65, 100, 128, 256, 300, 512, 1024, MOST_ROWS])
    @pytest.mark.parametrize(
        ("n", "k"), [(4096, 4096), (12288, 4096), (4096, 12288), (18944, 3584), (64, 128)]
    )
    def test_defaults_fit(self, rows: int, n: int, k: int, form: WeightForm):
        tiles = default_tiles(rows, n, k, KINDS[form].bits, shifted=form == "uint4")
        blocks, clusters = tiles.blocks(rows + -rows % tiles.rows, n)
        assert blocks * tiles.rows >= rows
        assert clusters * tiles.cluster * tiles.columns == n
        assert tiles.stages >= 3

    def test_as_many_blocks_as_processors(self):
        """512 rows of a matrix with 4096 outputs are 64 blocks of 256 rows, and 128 of 128."""
        assert default_tiles(512, 4096, 4096, 8).rows == 128
        assert default_tiles(1024, 4096, 4096, 8).rows == 256

    def test_refusals(self):
        with pytest.raises(NotImplementedError, match=r"not \(320, 2, 1\)"):
            Tiles(320, 2, 1, 8)
        with pytest.raises(NotImplementedError, match=r"a cluster \(2, 1\) blocks, not \(64, 2, 4\)"):
            Tiles(64, 2, 4, 8)
        with pytest.raises(NotImplementedError, match="clusters of 256 columns do not make up 128 and 192"):
            Tiles(64, 2, 2, 8).blocks(128, 192)


class TestRefusals:
    def test_sides(self, form: WeightForm):
        x, weight, _ = operands(form, 65, 96)
        with pytest.raises(NotImplementedError, match="multiples of 64 and 128, not 96 and 384"):
            check_mosaic_gpu(x, weight)

    @pytest.mark.parametrize("rows", [0, MOST_ROWS + 1])
    def test_rows(self, rows: int, form: WeightForm):
        x, weight, _ = operands(form, rows, 64)
        with pytest.raises(NotImplementedError, match=f"takes 1 to {MOST_ROWS} rows, not {rows}"):
            check_mosaic_gpu(x, weight)

    def test_types(self, form: WeightForm):
        x, weight, _ = operands(form, 65, 64, jnp.float32)
        with pytest.raises(NotImplementedError, match="not of float32"):
            check_mosaic_gpu(x, weight)
