"""Grouped products in Triton against float64, in Triton's interpreter, and where they are chosen."""

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.device import Target
from jdllm.pallas.grouped_matmul import Implementation, api, grouped_matmul, padded
from jdllm.pallas.triton_launch import ProductSizes, Schedule
from tests.pallas.test_grouped_matmul import oracle
from tests.pallas.triton_interpreter import interpreted

ALL_GROUPS, FIRST, K, N = 8, 2, 50, 37
SIZES = np.array([21, 0, 3, 30, 1], np.int32)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@pytest.fixture(scope="module")
def form() -> Iterator[Any]:
    """The module of the form, whose kernel is interpreted."""
    yield from interpreted("grouped_matmul")


def cut(rows: int = 16, columns: int = 64, depth: int = 32) -> ProductSizes:
    return ProductSizes(rows, columns, depth, Schedule(4, 2))


def operands(
    rows: int, dtype: Any = jnp.float32, k: int = K, n: int = N
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows, weights and gates whose products are exact in `dtype`; those with gates are within +-4 mostly.

    All matrices that belong to no group are NaN.
    """
    rng = np.random.default_rng(rows)
    x = rng.integers(-1, 2, (rows, k))
    weights, gate = np.full((2, ALL_GROUPS, k, n), np.nan)
    for each in (weights, gate):
        each[FIRST : FIRST + len(SIZES)] = rng.integers(-1, 2, (len(SIZES), k, n))
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype), jnp.asarray(gate / 8, dtype)


def check(form: Any, sizes: Any, gated: bool = False, dtype: Any = jnp.float32, **options: Any) -> None:
    sizes = np.asarray(sizes, np.int32)
    shape = {name: options.pop(name) for name in ("k", "n") if name in options}
    x, weights, gate = operands(int(sizes.sum()), dtype, **shape)
    actual = form.grouped_matmul_triton(
        x, weights, jnp.asarray(sizes), jnp.int32(FIRST), gate if gated else None, sizes=cut(**options)
    )
    assert actual.dtype == dtype
    expected, rounding = oracle(x, weights, sizes, FIRST), 0.0
    if gated:
        gates = oracle(x, gate, sizes, FIRST)
        expected *= gates / (1 + np.exp(-gates))
        # The silu and the product are rounded; the interpreter drops the bits that bfloat16 does not have.
        rounding = 2.5 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_each_row_meets_the_matrix_of_its_group(form: Any, gated: bool, dtype: Any):
    check(form, SIZES, gated, dtype)


@pytest.mark.parametrize(
    "sizes", [[0, 0, 40, 0, 0], [0, 0, 0, 0, 1], [1, 1, 6, 1, 8], [7, 16, 1, 0, 33], [15, 17, 0, 0, 32]]
)
def test_skewed_and_tiny_groups(form: Any, sizes: list[int]):
    check(form, sizes)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (32, 64), (17, 5), (33, 70)])
@pytest.mark.parametrize("gated", [False, True])
def test_any_sides(form: Any, gated: bool, k: int, n: int):
    check(form, [5, 0, 9, 0, 20], gated, k=k, n=n)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(32, 32, 16), (16, 128, 64)])
@pytest.mark.parametrize("gated", [False, True])
def test_other_cuts(form: Any, gated: bool, rows: int, columns: int, depth: int):
    check(form, SIZES, gated, rows=rows, columns=columns, depth=depth)


def test_more_units_than_start_together(form: Any):
    check(form, [50, 120, 0, 33, 7], n=40)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_the_others(form: Any, monkeypatch: pytest.MonkeyPatch, gated: bool):
    """The same rows in groups of other sizes, at other places of a unit and beside NaN: the same bits."""
    # What it calls otherwise adds in another order at the edges of a tile.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ij,jk->ik", a, b, dtype=dtype))
    rng = np.random.default_rng(0)
    x, weights, gate = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((60, K), (3, K, N), (3, K, N))
    )

    def run(x: jax.Array, sizes: list[int]) -> np.ndarray:
        gates = gate if gated else None
        y = form.grouped_matmul_triton(x, weights, jnp.asarray(sizes), 0, gates, sizes=cut())
        return np.asarray(y)

    whole = run(x, [35, 0, 25])
    kept = np.r_[20:35, 38:41, 59]
    np.testing.assert_array_equal(run(x[kept], [15, 0, 4]), whole[kept])
    spoilt = x.at[np.setdiff1d(np.arange(60), kept)].set(jnp.nan)
    np.testing.assert_array_equal(run(spoilt, [35, 0, 25])[kept], whole[kept])


def test_programs_without_a_unit_write_nothing(form: Any):
    """There are as many programs as the worst sizes need; here all rows but one lie behind the groups."""
    x, weights, _ = operands(40)
    sizes = jnp.asarray([1, 0, 0, 0, 0])
    y = form.grouped_matmul_triton(x, weights, sizes, FIRST, sizes=cut())
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1:]).all()


@pytest.mark.parametrize(("rows", "groups"), [(0, 5), (7, 0)])
def test_nothing_to_multiply(form: Any, rows: int, groups: int):
    x, weights, _ = operands(rows)
    y = form.grouped_matmul_triton(x, weights, jnp.zeros(groups, jnp.int32), 0)
    np.testing.assert_array_equal(y, np.zeros((rows, N)))


@pytest.mark.parametrize(
    ("dtypes", "shape", "gate", "reason"),
    [
        (("float32", "bfloat16"), (2, 64, 64), None, "of bfloat16, float32"),
        (("float8_e4m3fn",) * 2, (2, 64, 64), None, "not of float8_e4m3fn"),
        (("float32",) * 2, (2, 64, 0), None, r"without numbers, \(64, 0\)"),
        (("float32",) * 2, (2, 64, 64), (2, 64, 32), "gates of the shape"),
    ],
)
def test_names_the_limit(form: Any, dtypes: tuple[str, str], shape: Any, gate: Any, reason: str):
    x, weights = (jnp.ones(s, t) for s, t in zip(((3, 64), shape), dtypes, strict=True))
    gates = None if gate is None else jnp.ones(gate, x.dtype)
    with pytest.raises(NotImplementedError, match=reason):
        form.grouped_matmul_triton(x, weights, jnp.asarray([1, 2]), 0, gates)


@pytest.mark.parametrize("capability", [8.0, 8.6, 9.0, 10.0, 12.0, 99.0])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_card_has_sizes_for_any_number_of_rows(form: Any, itemsize: int, capability: float):
    """Tensor cores take 64 rows at a time on some cards: fewer might be added in another order."""
    for rows in (1, 64, 65, 4096):
        assert form.sizes_for(rows, itemsize, capability).rows >= 64


class TestChoice:
    """Which form runs on which card, and what is said about it."""

    @pytest.fixture
    def chosen(self, form: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The forms that were asked to multiply."""
        names: list[str] = []
        for module, function in ((form, "grouped_matmul_triton"), (padded, "grouped_matmul_padded")):
            monkeypatch.setattr(module, function, lambda *_, name=function: names.append(name) or "product")
        return names

    @staticmethod
    def call(
        monkeypatch: pytest.MonkeyPatch, device: Target, implementation: Implementation | None = None
    ) -> None:
        monkeypatch.setattr(api, "target", lambda _: device)
        x, weights = jnp.ones((3, 24)), jnp.ones((2, 24, 40))
        assert grouped_matmul(x, weights, jnp.asarray([1, 2]), implementation=implementation) == "product"

    def test_it_runs_where_it_is_asked_for_or_preferred_or_the_only_kernel(self, chosen, monkeypatch):
        self.call(monkeypatch, Target(True, 8.0), "triton")
        self.call(monkeypatch, Target(True, 9.0, kernels="triton"))
        self.call(monkeypatch, Target(True, 8.0))
        self.call(monkeypatch, Target(True, 9.0))
        assert chosen == ["grouped_matmul_triton"] * 4

    def test_cards_without_it_are_warned_about_unless_it_is_turned_off(self, chosen, monkeypatch):
        old = Target(True, 7.5, kernels="triton")
        with pytest.warns(UserWarning, match="slow, portable form.*Ampere and newer cards only"):
            self.call(monkeypatch, old)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.call(monkeypatch, old._replace(kernels="xla"))
        assert chosen == ["grouped_matmul_padded"] * 2

    @pytest.mark.parametrize(
        ("device", "reason"),
        [
            (Target(False, None), "Ampere and newer cards only"),
            (Target(True, 7.5), "Ampere and newer cards only"),
            (Target(True, 8.0, triton=False), "needs jax-triton, of the extras cuda12 and cuda13"),
        ],
    )
    def test_where_it_cannot_run(self, chosen, monkeypatch, device: Target, reason: str):
        with pytest.raises(NotImplementedError, match=reason):
            self.call(monkeypatch, device, "triton")
        assert not chosen
