"""Products of a few rows in Triton against float64, in Triton's interpreter, and where they are chosen."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.device import Target
from jdllm.pallas.skinny_matmul import Implementation, api, skinny_matmul, xla
from jdllm.pallas.triton_launch import ProductSizes, Schedule
from tests.pallas.rotation import turned
from tests.pallas.test_skinny_matmul import LAYER, LAYERS, different_outputs, operands
from tests.pallas.triton_interpreter import interpreted

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@pytest.fixture(scope="module")
def form() -> Iterator[Any]:
    """The module of the form, whose kernel is interpreted."""
    yield from interpreted("skinny_matmul")


@pytest.fixture
def whole(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are not cut into parts."""
    monkeypatch.setattr(form, "PROGRAMS", 1)


def cut(rows: int = 32, columns: int = 64, depth: int = 64) -> ProductSizes:
    return ProductSizes(rows, columns, depth, Schedule(4, 2))


def check(
    form: Any,
    x: jax.Array,
    stacks: Sequence[jax.Array],
    gated: bool = False,
    sizes: ProductSizes | None = None,
    layer: Any = LAYER,
) -> None:
    actual = form.skinny_matmul_triton(x, stacks, layer=layer, gated=gated, sizes=sizes or cut())
    exact = [np.asarray(x, np.float64) @ np.asarray(w[int(layer)], np.float64).T for w in stacks]
    rounding = 0.0
    if gated:
        exact = [exact[0] / (1 + np.exp(-exact[0])) * exact[1]]
        # The silu and the product are rounded; the interpreter drops the bits that bfloat16 does not have.
        rounding = 2.5 * float(jnp.finfo(x.dtype).eps)
    for product, expected in zip(actual, exact, strict=True):
        assert product.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(product, np.float64), expected, rtol=rounding)


@pytest.mark.parametrize(
    ("weights", "gated", "dtype"),
    [
        (1, False, jnp.bfloat16),
        (2, False, jnp.float32),
        (3, False, jnp.float16),
        *((2, True, dtype) for dtype in DTYPES),
    ],
)
def test_products(form: Any, weights: int, gated: bool, dtype: Any):
    """The last block has outputs beyond the weight, and parts of five steps differ."""
    check(form, *operands(20, 80, 320, weights, gated, dtype), gated)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [1, 3])
def test_whole_inputs(form: Any, weights: int, dtype: Any):
    check(form, *operands(20, 80, 160, weights, dtype=dtype))


@pytest.mark.parametrize(("rows", "block"), [(1, 16), (16, 16), (33, 64), (64, 64)])
@pytest.mark.parametrize("gated", [False, True])
def test_any_number_of_rows(form: Any, gated: bool, rows: int, block: int):
    check(form, *operands(rows, 32, 128, 2, gated), gated, cut(block))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 17), (32, 64), (33, 129)])
@pytest.mark.parametrize("gated", [False, True])
def test_any_sides(form: Any, gated: bool, n: int, k: int):
    check(form, *operands(9, n, k, 2, gated), gated)


@pytest.mark.parametrize(("columns", "depth"), [(32, 32), (128, 128)])
@pytest.mark.parametrize("gated", [False, True])
def test_other_cuts(form: Any, gated: bool, columns: int, depth: int):
    check(form, *operands(20, 80, 150, 2, gated), gated, cut(32, columns, depth))


@pytest.mark.parametrize("programs", [1, 20, 10_000])
def test_parts_of_any_number(form: Any, monkeypatch: pytest.MonkeyPatch, programs: int):
    monkeypatch.setattr(form, "PROGRAMS", programs)
    check(form, *operands(20, 64, 600, 1))


@pytest.mark.parametrize("outputs", [(64, 32), (48, 16, 80)])
@pytest.mark.parametrize("biased", [False, True])
def test_weights_of_different_outputs(form: Any, outputs: tuple[int, ...], biased: bool):
    x, exact, stacks, bias = different_outputs(outputs, biased)
    actual = form.skinny_matmul_triton(x, stacks, layer=LAYER, bias=bias, sizes=cut())
    for product, expected in zip(actual, exact, strict=True):
        np.testing.assert_array_equal(np.asarray(product, np.float64), expected)


@pytest.mark.usefixtures("whole")
def test_a_bias_is_added_before_the_sum_is_rounded(form: Any):
    """256 + 1 - 256, of which bfloat16 has no 257."""
    x, w, bias = (jnp.asarray(v, jnp.bfloat16) for v in ([[256, 1]], [[[1, 1]]], [[-256]]))
    (product,) = form.skinny_matmul_triton(x, (w,), layer=0, bias=bias, sizes=cut())
    assert product.tolist() == [[1]]


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
def test_rotated_queries_and_keys_of_fewer_heads(form: Any, biased: bool):
    x, exact, stacks, bias = different_outputs((96, 32, 32), biased)
    angles = jnp.asarray(np.random.default_rng(0).uniform(0, 6, (len(x), 16)), jnp.float32)
    rotation = jnp.cos(angles), jnp.sin(angles)
    actual = form.skinny_matmul_triton(x, stacks, layer=LAYER, bias=bias, rotation=rotation, sizes=cut())
    for index, (product, wanted) in enumerate(zip(actual, exact, strict=True)):
        expected = turned(wanted, angles * (index < 2))
        rounding = float(jnp.finfo(x.dtype).eps)
        np.testing.assert_allclose(np.asarray(product, np.float64), expected, rtol=rounding, atol=1e-4)


def test_a_layer_of_the_device(form: Any):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-1, 2, s), jnp.bfloat16) for s in ((8, 64), (LAYERS, 16, 64)))
    for layer in range(LAYERS):
        check(form, x, (w,), layer=jnp.int32(layer))


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_what_the_others_hold(form: Any, gated: bool):
    rng = np.random.default_rng(0)
    x, *stacks = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((16, 192), *((1, 40, 192),) * 2))
    other = x.at[:4].multiply(3).at[9].set(jnp.nan)
    kept = np.r_[4:9, 10:16]
    one, another = (
        form.skinny_matmul_triton(rows, stacks, layer=0, gated=gated, sizes=cut()) for rows in (x, other)
    )
    for a, b in zip(one, another, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[kept], np.asarray(b)[kept])


@pytest.mark.parametrize(
    ("rows", "shape", "dtypes", "reason"),
    [
        (8, (1, 16, 64), ("float32", "bfloat16"), "of bfloat16, float32"),
        (8, (1, 16, 64), ("float8_e4m3fn",) * 2, "not of float8_e4m3fn"),
        (65, (1, 16, 64), ("float32",) * 2, "1 to 64 rows, not 65"),
        (0, (1, 16, 64), ("float32",) * 2, "1 to 64 rows, not 0"),
        (8, (1, 0, 64), ("float32",) * 2, r"no weights of \[\(1, 0, 64\)\]"),
    ],
)
def test_names_the_limit(form: Any, rows: int, shape: Any, dtypes: tuple[str, str], reason: str):
    x, w = jnp.ones((rows, 64), dtypes[0]), jnp.ones(shape, dtypes[1])
    with pytest.raises(NotImplementedError, match=reason):
        form.skinny_matmul_triton(x, (w,), layer=0)


@pytest.mark.parametrize("capability", [8.0, 8.6, 9.0, 10.0, 12.0, 99.0])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_card_has_sizes_for_any_number_of_rows(form: Any, itemsize: int, capability: float):
    for rows in range(1, 65):
        assert form.sizes_for(rows, itemsize, capability).rows >= rows


class TestChoice:
    """Which form runs on which card."""

    @pytest.fixture
    def chosen(self, form: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The forms that were asked to multiply."""
        names: list[str] = []
        for module, function in ((form, "skinny_matmul_triton"), (xla, "skinny_matmul_xla")):
            monkeypatch.setattr(module, function, lambda *_, name=function, **__: names.append(name) or ())
        return names

    @staticmethod
    def call(
        monkeypatch: pytest.MonkeyPatch, device: Target, implementation: Implementation | None = None
    ) -> None:
        monkeypatch.setattr(api, "target", lambda: device)
        x, stacks = operands(8, 16, 64, 1)
        assert skinny_matmul(x, stacks, implementation=implementation) == ()

    def test_it_runs_where_it_is_asked_for_or_preferred_or_the_only_kernel(self, chosen, monkeypatch):
        self.call(monkeypatch, Target(True, 8.0))
        self.call(monkeypatch, Target(True, 8.0), "triton")
        self.call(monkeypatch, Target(True, 9.0, kernels="triton"))
        self.call(monkeypatch, Target(True, 9.0, kernels="xla"))
        assert chosen == [*["skinny_matmul_triton"] * 3, "skinny_matmul_xla"]

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
