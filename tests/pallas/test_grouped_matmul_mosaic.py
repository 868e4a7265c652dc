"""Grouped products on Hopper against float64, in interpret mode; tests/gpu runs them on a card."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.pallas.device import Target
from jdllm.pallas.grouped_matmul import Implementation, api, grouped_matmul, mosaic_gpu, padded
from jdllm.pallas.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu
from jdllm.pallas.grouped_matmul.row_units import row_units
from jdllm.pallas.grouped_matmul.tiles import LOADER_REGISTERS, Tiles, default_tiles

K, N, ALL_GROUPS, FIRST = 128, 128, 8, 2
SIZES = np.array([67, 0, 3, 130, 100], np.int32)
ROWS = int(SIZES.sum())
ONE = Tiles(1, 64, row_groups=2, column_groups=1, row_blocks=1, column_blocks=1, stages=2, processors=2)
GATED = dataclasses.replace(ONE, matrices=2)
WIDE = dataclasses.replace(ONE, columns=128, row_groups=1, stages=3)
COLUMN_GROUPS = dataclasses.replace(ONE, row_groups=1, column_groups=2)
ROW_PAIR = dataclasses.replace(ONE, row_groups=1, row_blocks=2, processors=4)
COLUMN_PAIR = dataclasses.replace(ONE, row_groups=1, column_blocks=2, processors=4)
GATED_PAIR = dataclasses.replace(ROW_PAIR, matrices=2)


def slow(*values: object):
    """A case for the longer lane: interpreting a kernel takes seconds."""
    return pytest.param(*values, marks=pytest.mark.slow)


def operands(rows: int, dtype=jnp.bfloat16) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows, weights and gates whose products are exact in `dtype`; those with gates are within +-4 mostly."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.integers(-1, 2, (rows, K)), dtype)
    weights, gate = (jnp.asarray(rng.integers(-1, 2, (ALL_GROUPS, K, N)), dtype) for _ in range(2))
    return x, weights, gate / 8


def products(x: jax.Array, weights: jax.Array, sizes: np.ndarray, first: int = FIRST) -> np.ndarray:
    group = first + np.repeat(np.arange(len(sizes)), sizes)
    return np.einsum("rk,rkn->rn", *(np.asarray(v, np.float64) for v in (x, weights[group])), optimize=True)


def check(sizes: np.ndarray, tiles: Tiles | None, dtype=jnp.bfloat16) -> None:
    x, weights, gate = operands(int(sizes.sum()), dtype)
    gate = gate if tiles and tiles.matrices == 2 else None
    actual = grouped_matmul_mosaic_gpu(x, weights, jnp.asarray(sizes), jnp.int32(FIRST), gate, tiles=tiles)
    assert actual.dtype == dtype
    expected, rounding = products(x, weights, sizes), 0.0
    if gate is not None:
        exact_gate = products(x, gate, sizes)
        assert np.abs(exact_gate).max() < 32
        expected *= exact_gate / (1 + np.exp(-exact_gate))
        rounding = 1.01 * float(jnp.finfo(dtype).eps)  # half of it by the silu, half by the product
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rounding)


@pytest.mark.usefixtures("interpreted")
class TestProducts:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "tiles",
        [
            slow(ONE),
            slow(GATED),
            slow(WIDE),
            slow(COLUMN_GROUPS),
            slow(ROW_PAIR),
            slow(COLUMN_PAIR),
            GATED_PAIR,
            slow(None),
        ],
    )
    def test_each_row_meets_the_matrix_of_its_group(self, tiles: Tiles | None):
        check(SIZES, tiles)

    @pytest.mark.parametrize(
        "sizes",
        [
            slow([0, 0, 300, 0, 0]),
            slow([0, 0, 0, 0, 1]),
            slow([1, 1, 6, 1, 8]),
            slow([7, 64, 1, 0, 121]),
            slow([63, 65, 127, 0, 129]),
        ],
    )
    def test_skewed_and_tiny_groups(self, sizes: list[int]):
        check(np.array(sizes, np.int32), ONE)

    @pytest.mark.slow
    def test_float16(self):
        check(SIZES, GATED, jnp.float16)

    @pytest.mark.slow
    def test_a_row_does_not_depend_on_the_others(self):
        """The same rows in groups of other sizes, and at other places of a tile: the same bits."""
        rng = np.random.default_rng(0)
        x, weights = (
            jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((150, K), (ALL_GROUPS, K, N))
        )
        run = functools.partial(grouped_matmul_mosaic_gpu, weights=weights, first_group=0, tiles=ONE)
        whole = np.asarray(run(x, group_sizes=jnp.asarray([80, 0, 70])))
        kept = np.r_[75:80, 83:86, 149]
        part = np.asarray(run(x[kept], group_sizes=jnp.asarray([5, 0, 4])))
        np.testing.assert_array_equal(part, whole[kept])


@pytest.mark.parametrize(("rows", "groups"), [(0, 5), (7, 0)])
def test_nothing_to_multiply(rows: int, groups: int):
    x, weights, _ = operands(rows)
    out = grouped_matmul_mosaic_gpu(x, weights, jnp.zeros(groups, jnp.int32), 0)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.zeros((rows, N)))


class TestRowUnits:
    """`row_units` against a loop over groups."""

    @staticmethod
    @functools.cache
    def compiled(unit_rows: int):
        return jax.jit(lambda sizes, first: row_units(sizes, first, 700, unit_rows))

    @pytest.mark.parametrize("unit_rows", [64, 128, 256])
    @given(data=st.data())
    def test_units_cover_each_row_once(self, unit_rows: int, data: st.DataObject):
        cuts = sorted(data.draw(st.lists(st.integers(0, 700), min_size=11, max_size=11)))
        sizes = np.diff([0, *cuts, 700]).astype(np.int32)
        units = self.compiled(unit_rows)(sizes, 24)
        count = int(units.ends[-1])
        assert count <= len(units.matrix)
        expected = []
        for group, last in enumerate(np.cumsum(sizes)):
            first = last - sizes[group]
            starts = range(first // 8 * 8, last, unit_rows) if sizes[group] else ()
            expected += [(24 + group, start, first, last) for start in starts]
        np.testing.assert_array_equal(np.stack(units[:4], axis=1)[:count], expected)

    def test_there_is_room_for_the_worst_sizes(self):
        """Groups that begin just before a multiple of 8 and end just after a unit."""
        sizes = np.array([7, *[122] * 4, 1], np.int32)
        rows = int(sizes.sum())
        units = row_units(sizes, 0, rows, 128)
        brute = sum(
            len(range((e - s) // 8 * 8, e, 128)) for s, e in zip(sizes, np.cumsum(sizes), strict=True)
        )
        assert int(units.ends[-1]) == brute <= len(units.matrix)


class TestTiles:
    @pytest.mark.parametrize("n", [64, 128, 192, 1024, 2048])
    @pytest.mark.parametrize("matrices", [1, 2])
    def test_default_cuts_divide_the_matrices(self, n: int, matrices: int):
        assert n % default_tiles(n, matrices).unit_columns == 0

    def test_products_of_a_layer_share_their_units(self):
        assert default_tiles(1024, 2).unit_rows == default_tiles(2048, 1).unit_rows

    @pytest.mark.parametrize(
        ("cut", "reason"),
        [
            ((1, 96, 2, 1, 1, 1, 4), "not 96 of 1"),
            ((2, 256, 1, 1, 1, 1, 2), "not 256 of 2"),
            ((1, 256, 1, 2, 1, 1, 2), "not 64 and 512"),
            ((1, 256, 2, 1, 1, 1, 5), "tiles of 278528 bytes"),
        ],
    )
    def test_cuts_that_a_block_cannot_load_are_refused(self, cut: tuple[int, ...], reason: str):
        with pytest.raises(NotImplementedError, match=reason):
            Tiles(*cut)

    @pytest.mark.parametrize(("row_groups", "initial"), [(1, 256), (2, 168), (3, 128), (4, 96)])
    def test_warpgroups_ask_for_no_more_registers_than_their_block_has(self, row_groups: int, initial: int):
        """`initial` is what a block of 65536 registers gives each thread."""
        tiles = dataclasses.replace(ONE, row_groups=row_groups)
        asked_for = LOADER_REGISTERS + row_groups * tiles.consumer_registers
        assert asked_for <= (row_groups + 1) * initial


class TestRefusals:
    @pytest.mark.parametrize(
        ("k", "n", "dtype", "reason"),
        [
            (64, 64, jnp.float32, "not of float32"),
            (96, 64, jnp.bfloat16, "not 96 and 64"),
            (64, 96, jnp.bfloat16, "not 64 and 96"),
        ],
    )
    def test_names_the_limit(self, k: int, n: int, dtype, reason: str):
        x, weights = jnp.ones((3, k), dtype), jnp.ones((2, k, n), dtype)
        with pytest.raises(NotImplementedError, match=reason):
            grouped_matmul_mosaic_gpu(x, weights, jnp.asarray([1, 2]), 0)

    def test_operands_of_two_types(self):
        x, weights = jnp.ones((3, 64), jnp.float16), jnp.ones((2, 64, 64), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="bfloat16, float16"):
            grouped_matmul_mosaic_gpu(x, weights, jnp.asarray([1, 2]), 0)

    def test_gates_of_another_shape(self):
        x, weights, gate = (jnp.ones(s, jnp.bfloat16) for s in ((3, 64), (2, 64, 64), (2, 64, 128)))
        with pytest.raises(NotImplementedError, match="gates of the shape"):
            grouped_matmul_mosaic_gpu(x, weights, jnp.asarray([1, 2]), 0, gate)

    @pytest.mark.parametrize(("tiles", "n"), [(GATED, 64), (WIDE, 64)])
    def test_tiles_for_other_matrices(self, tiles: Tiles, n: int):
        x, weights = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((2, 64, n), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="do not divide 64 columns of 1"):
            grouped_matmul_mosaic_gpu(x, weights, jnp.asarray([1, 2]), 0, tiles=tiles)


class TestChoice:
    @pytest.fixture
    def chosen(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The forms that were asked to multiply."""
        names: list[str] = []
        monkeypatch.setattr(
            mosaic_gpu, "grouped_matmul_mosaic_gpu", lambda *_: names.append("mosaic_gpu") or "product"
        )
        monkeypatch.setattr(padded, "grouped_matmul_padded", lambda *_: names.append("padded") or "product")
        return names

    @staticmethod
    def call(dtype=jnp.bfloat16, implementation: Implementation | None = None) -> None:
        x, weights = jnp.ones((3, 64), dtype), jnp.ones((2, 64, 64), dtype)
        assert grouped_matmul(x, weights, jnp.asarray([1, 2]), implementation=implementation) == "product"

    @pytest.mark.parametrize(
        ("device", "dtype", "form"),
        [
            (Target(True, 9.0), jnp.bfloat16, "mosaic_gpu"),
            (Target(True, None), jnp.float16, "mosaic_gpu"),
            (Target(False, None), jnp.bfloat16, "padded"),
            (Target(False, None), jnp.float32, "padded"),
        ],
    )
    def test_by_default_the_fastest_that_can_run(self, chosen, monkeypatch, device, dtype, form):
        monkeypatch.setattr(api, "target", lambda _: device)
        self.call(dtype)
        assert chosen == [form]

    @pytest.mark.parametrize(
        ("device", "dtype", "reason"),
        [
            (Target(True, 8.0, triton=False), jnp.bfloat16, "Hopper only"),
            (Target(True, 10.0, triton=False), jnp.bfloat16, "needs jax-triton"),
            (Target(True, 9.0, triton=False), jnp.float32, "not of float32"),
        ],
    )
    def test_a_card_that_cannot_run_the_kernel_is_warned_about(
        self, chosen, monkeypatch, device, dtype, reason
    ):
        monkeypatch.setattr(api, "target", lambda _: device)
        with pytest.warns(UserWarning, match=f"slow, portable form.*{reason}") as warned:
            self.call(dtype)
        assert chosen == ["padded"]
        assert warned[0].filename == __file__

    @pytest.mark.parametrize("form", ["mosaic_gpu", "padded"])
    def test_an_explicit_choice_is_made(self, chosen, monkeypatch, form: Implementation):
        monkeypatch.setattr(api, "target", lambda _: Target(True, 9.0))
        self.call(implementation=form)
        assert chosen == [form]

    @pytest.mark.parametrize("device", [Target(True, 8.0), Target(False, None)])
    def test_it_runs_on_hopper_only(self, monkeypatch, device):
        monkeypatch.setattr(api, "target", lambda _: device)
        with pytest.raises(NotImplementedError, match="Hopper only"):
            self.call(implementation="mosaic_gpu")


@pytest.mark.parametrize("form", ["padded", "reference"])
def test_a_gate_in_the_portable_forms(form: Implementation):
    x, weights, gate = operands(ROWS, jnp.float32)
    actual = grouped_matmul(x, weights, SIZES, first_group=FIRST, gate=gate, implementation=form)
    exact_gate = products(x, gate, SIZES)
    expected = exact_gate / (1 + np.exp(-exact_gate)) * products(x, weights, SIZES)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
