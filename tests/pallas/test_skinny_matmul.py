"""Products of a few rows against float64: the portable form, and the Hopper kernel in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.layers import linear, rotate
from jdllm.pallas.device import Target
from jdllm.pallas.skinny_matmul import Implementation, api, skinny_matmul, xla
from jdllm.pallas.skinny_matmul.limits import check_mosaic_gpu
from jdllm.pallas.skinny_matmul.mosaic_gpu import skinny_matmul_mosaic_gpu, skinny_parts_mosaic_gpu
from jdllm.pallas.skinny_matmul.tiles import DEPTH, Tiles
from tests.pallas.rotation import turned

LAYERS, LAYER = 3, 1

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def operands(
    rows: int, n: int, k: int, weights: int, gated: bool = False, dtype=jnp.bfloat16
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Rows and stacks whose products are exact in `dtype`; those with gates are within +-4 mostly.

    All layers but `LAYER` hold large numbers.
    """
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.integers(-1, 2, (rows, k)), dtype)
    stacks = [np.full((LAYERS, n, k), 999.0) for _ in range(weights)]
    for index, stack in enumerate(stacks):
        stack[LAYER] = rng.integers(-1, 2, (n, k)) / (8 if gated and index == 0 else 1)
    return x, tuple(jnp.asarray(stack, dtype) for stack in stacks)


def different_outputs(
    outputs: tuple[int, ...], biased: bool
) -> tuple[jax.Array, list[np.ndarray], list[jax.Array], jax.Array | None]:
    """Rows, exact products with weights of so many outputs, these, and what is added if anything is."""
    x, stacks = operands(13, max(outputs), 5 * DEPTH, len(outputs))
    own = [w[:, :n] for w, n in zip(stacks, outputs, strict=True)]
    bias = np.random.default_rng(1).integers(-9, 10, (LAYERS, sum(outputs))) * biased
    added = np.split(bias[LAYER], np.cumsum(outputs)[:-1])
    rows, weights = np.asarray(x, np.float64), [np.asarray(w[LAYER], np.float64) for w in own]
    exact = [rows @ w.T + b for w, b in zip(weights, added, strict=True)]
    return x, exact, own, jnp.asarray(bias, x.dtype) if biased else None


def check(
    actual: tuple[jax.Array, ...],
    x: jax.Array,
    stacks: tuple[jax.Array, ...],
    gated: bool = False,
    layer: int = LAYER,
) -> None:
    exact = [np.asarray(x, np.float64) @ np.asarray(w[layer], np.float64).T for w in stacks]
    rounding = 0.0
    if gated:
        gate, up = exact
        exact = [gate / (1 + np.exp(-gate)) * up]
        rounding = 1.01 * float(jnp.finfo(x.dtype).eps)  # half of it by the silu, half by the product
    for product, expected in zip(actual, exact, strict=True):
        assert product.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(product, np.float64), expected, rtol=rounding)


@pytest.mark.usefixtures("interpreted")
class TestKernel:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("weights", "gated", "tiles"),
        [
            slow(1, False, Tiles(32, 1, 2)),
            slow(1, False, Tiles(32, 2, 2)),
            (1, False, Tiles(80, 5, 1)),
            (2, False, Tiles(48, 3, 2)),
            slow(3, False, Tiles(32, 1, 8)),
            (2, True, Tiles(48, 1, 3)),
            slow(2, True, Tiles(96, 1, 2)),
            slow(1, False, None),
            slow(3, False, None),
            (2, True, None),
        ],
    )
    @pytest.mark.parametrize("chained", [False, slow(True)])
    def test_cuts(self, weights: int, gated: bool, tiles: Tiles | None, chained: bool):
        """The last block has columns beyond the weights, and parts of five steps differ."""
        x, stacks = operands(20, 80, 5 * DEPTH, weights, gated)
        actual = skinny_matmul_mosaic_gpu(x, stacks, layer=LAYER, gated=gated, chained=chained, tiles=tiles)
        check(actual, x, stacks, gated)

    @pytest.mark.parametrize("rows", [slow(1), slow(8), slow(32), 64])
    @pytest.mark.parametrize(("gated", "tiles"), [(True, Tiles(32, 1, 2)), (False, Tiles(32, 2, 2))])
    def test_rows(self, rows: int, gated: bool, tiles: Tiles):
        x, stacks = operands(rows, 64, 128, 2, gated)
        check(skinny_matmul_mosaic_gpu(x, stacks, layer=LAYER, gated=gated, tiles=tiles), x, stacks, gated)

    @pytest.mark.parametrize(("gated", "tiles"), [slow(True, Tiles(32, 1, 2)), (False, Tiles(32, 2, 2))])
    def test_float16(self, gated: bool, tiles: Tiles):
        x, stacks = operands(9, 32, 128, 2, gated, jnp.float16)
        check(skinny_matmul_mosaic_gpu(x, stacks, layer=LAYER, gated=gated, tiles=tiles), x, stacks, gated)

    @pytest.mark.parametrize(
        ("head_dim", "tiles"), [slow(64, Tiles(32, 1, 2)), slow(128, Tiles(64, 1, 3)), slow(128, None)]
    )
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
    def test_rotated_queries_and_keys(self, head_dim: int, tiles: Tiles | None, dtype):
        x, stacks = operands(13, 256, 128, 3, dtype=dtype)
        angles = jnp.asarray(np.random.default_rng(0).uniform(0, 6, (13, head_dim // 2)), jnp.float32)
        rotation = jnp.cos(angles), jnp.sin(angles)
        actual = skinny_matmul_mosaic_gpu(x, stacks, layer=LAYER, rotation=rotation, tiles=tiles)
        expected = skinny_matmul(x, stacks, layer=LAYER, rotation=rotation, implementation="xla")
        for index, forms in enumerate(zip(actual, expected, strict=True)):
            product = np.asarray(x, np.float64) @ np.asarray(stacks[index][LAYER], np.float64).T
            exact = turned(product, angles * (index < 2))
            for form in forms:
                np.testing.assert_allclose(
                    np.asarray(form, np.float64), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-4
                )

    @pytest.mark.slow
    @pytest.mark.parametrize("outputs", [(64, 32), slow((48, 16, 80))])
    @pytest.mark.parametrize("biased", [slow(False), True])
    def test_weights_of_different_outputs(self, outputs: tuple[int, ...], biased: bool):
        """Blocks of one weight each, the last of each with columns beyond it."""
        x, exact, stacks, bias = different_outputs(outputs, biased)
        for tiles in (Tiles(16 if biased else 32, 1, 2), None):
            actual = skinny_matmul_mosaic_gpu(x, stacks, layer=LAYER, bias=bias, chained=True, tiles=tiles)
            for product, expected in zip(actual, exact, strict=True):
                np.testing.assert_array_equal(np.asarray(product, np.float64), expected)

    @pytest.mark.slow
    def test_rotated_queries_and_keys_of_fewer_heads_with_a_bias(self):
        x, exact, stacks, bias = different_outputs((256, 64, 64), biased=True)
        angles = jnp.asarray(np.random.default_rng(0).uniform(0, 6, (len(x), 32)), jnp.float32)
        options = {"layer": LAYER, "bias": bias, "rotation": (jnp.cos(angles), jnp.sin(angles))}
        expected = [rotate(jnp.asarray(y).reshape(len(x), -1, 64), *options["rotation"]) for y in exact[:2]]
        for form in (
            skinny_matmul_mosaic_gpu(x, stacks, **options, tiles=Tiles(32, 1, 2)),
            skinny_matmul_mosaic_gpu(x, stacks, **options),
            skinny_matmul(x, stacks, **options, implementation="xla"),
        ):
            for product, wanted in zip(form, (*expected, exact[2]), strict=True):
                wanted = np.asarray(wanted, np.float64).reshape(product.shape)
                np.testing.assert_allclose(
                    np.asarray(product, np.float64), wanted, rtol=float(jnp.finfo(x.dtype).eps), atol=1e-4
                )

    def test_a_traced_layer(self):
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.integers(-1, 2, (8, 128)), jnp.bfloat16)
        stacks = (jnp.asarray(rng.integers(-1, 2, (LAYERS, 16, 128)), jnp.bfloat16),)
        jitted = jax.jit(lambda layer: skinny_matmul_mosaic_gpu(x, stacks, layer=layer))
        for layer in range(LAYERS):
            check(jitted(jnp.int32(layer)), x, stacks, layer=layer)

    @pytest.mark.slow
    def test_a_row_does_not_depend_on_what_the_others_hold(self):
        rng = np.random.default_rng(0)
        x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((16, 192), (1, 64, 192)))
        other = x.at[:4].multiply(3).at[9].set(0)
        whole, changed = (skinny_matmul_mosaic_gpu(v, (w,), layer=0)[0] for v in (x, other))
        kept = np.r_[4:9, 10:16]
        np.testing.assert_array_equal(np.asarray(whole)[kept], np.asarray(changed)[kept])

    @pytest.mark.parametrize("tiles", [slow(Tiles(32, 1, 2)), Tiles(32, 2, 2), slow(None)])
    def test_sums_in_parts(self, tiles: Tiles | None):
        x, (stack,) = operands(20, 64, 5 * DEPTH, 1)
        parts = skinny_parts_mosaic_gpu(x, stack, layer=LAYER, chained=True, tiles=tiles)
        exact = np.asarray(x, np.float64) @ np.asarray(stack[LAYER], np.float64).T
        assert parts.dtype == (jnp.float32 if len(parts) > 1 else x.dtype)
        np.testing.assert_array_equal(np.asarray(parts, np.float64).sum(0), exact.astype(parts.dtype))


class TestPortable:
    @pytest.mark.parametrize(("weights", "gated"), [(1, False), (3, False), (2, True)])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_products(self, weights: int, gated: bool, dtype):
        x, stacks = operands(20, 24, 100, weights, gated, dtype)
        actual = skinny_matmul(x, stacks, layer=LAYER, gated=gated, implementation="xla")
        if gated:  # silu in 16 bits rounds more often
            gate, up = (linear(x, w[LAYER]) for w in stacks)
            np.testing.assert_array_equal(actual[0], jax.nn.silu(gate) * up)
        else:
            check(actual, x, stacks)

    def test_any_number_of_rows_in_full_precision(self):
        rng = np.random.default_rng(0)
        x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((70, 10), (2, 6, 10)))
        (actual,) = skinny_matmul(x, (w,), layer=1)
        exact = np.asarray(x, np.float64) @ np.asarray(w[1], np.float64).T
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("cut", "weights", "gated", "reason"),
        [
            ((32, 2, 2), 2, True, "whole, not in 2 parts"),
            ((32, 3, 2), 1, False, "128 inputs do not make 3 parts of 64"),
            ((176, 1, 2), 2, True, "at most 320 columns, not 176 of both weights"),
            ((128, 1, 14), 1, False, "14 stages need 243712 bytes"),
        ],
    )
    def test_cuts_that_a_block_cannot_take(
        self, cut: tuple[int, int, int], weights: int, gated: bool, reason: str
    ):
        x, stacks = operands(8, 16, 128, weights)
        with pytest.raises(NotImplementedError, match=reason):
            skinny_matmul_mosaic_gpu(x, stacks, layer=0, gated=gated, tiles=Tiles(*cut))

    @pytest.mark.parametrize(
        ("rows", "n", "k", "dtype", "reason"),
        [
            (8, 16, 64, jnp.float32, "not of float32"),
            (65, 16, 64, jnp.bfloat16, "1 to 64 rows, not 65"),
            (0, 16, 64, jnp.bfloat16, "1 to 64 rows, not 0"),
            (8, 24, 64, jnp.bfloat16, "multiples of 16 and 64, not 24 and 64"),
            (8, 16, 96, jnp.bfloat16, "not 16 and 96"),
        ],
    )
    def test_the_limits_of_the_kernel(self, rows: int, n: int, k: int, dtype, reason: str):
        x, w = jnp.ones((rows, k), dtype), jnp.ones((1, n, k), dtype)
        with pytest.raises(NotImplementedError, match=reason):
            check_mosaic_gpu(x, (w,))

    def test_heads_that_no_block_can_rotate(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(api, "target", lambda: Target(True, 9.0, triton=False))
        x, stacks = operands(8, 96, 64, 3)
        angles = jnp.ones((8, 24))
        rotation = jnp.cos(angles), jnp.sin(angles)
        with pytest.raises(NotImplementedError, match="heads of multiples of 32, not of 48"):
            skinny_matmul(x, stacks, rotation=rotation, implementation="mosaic_gpu")
        portable = skinny_matmul(x, stacks, rotation=rotation, implementation="xla")
        for actual, expected in zip(skinny_matmul(x, stacks, rotation=rotation), portable, strict=True):
            np.testing.assert_array_equal(actual, expected)

    def test_operands_of_two_types(self):
        x, w = jnp.ones((8, 64), jnp.float16), jnp.ones((1, 16, 64), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="bfloat16, float16"):
            check_mosaic_gpu(x, (w,))

    @pytest.mark.parametrize(
        ("shapes", "gated", "reason"),
        [
            ([], False, "1 to 3 weights, not 0"),
            ([(1, 16, 64)] * 4, False, "not 4"),
            ([(1, 16, 64)] * 3, True, "two weights, not 3"),
            ([(1, 16, 64), (1, 32, 64)], True, "of one shape, not"),
            ([(1, 16, 64), (2, 16, 64)], False, "of as many layers and inputs, not"),
            ([(1, 16, 128)], False, "rows of 64 do not fit"),
        ],
    )
    def test_shapes_that_do_not_fit(self, shapes: list[tuple[int, ...]], gated: bool, reason: str):
        x, stacks = jnp.ones((8, 64), jnp.bfloat16), [jnp.ones(s, jnp.bfloat16) for s in shapes]
        with pytest.raises(ValueError, match=reason):
            skinny_matmul(x, stacks, gated=gated)

    def test_a_cut_whose_last_block_has_nothing_to_add(self):
        x, _, stacks, bias = different_outputs((64, 48), biased=True)
        with pytest.raises(NotImplementedError, match=r"divide its outputs: 32 not \[64, 48\]"):
            skinny_matmul_mosaic_gpu(x, stacks, layer=0, bias=bias, tiles=Tiles(32, 1, 2))

    def test_what_is_added_does_not_fit(self):
        x, stacks = operands(8, 16, 64, 2)
        with pytest.raises(ValueError, match=r"bias of \(3, 16\) does not fit products that take one of"):
            skinny_matmul(x, stacks, bias=jnp.ones((LAYERS, 16), x.dtype))
        with pytest.raises(ValueError, match="does not fit a gated product"):
            skinny_matmul(x, stacks, gated=True, bias=jnp.ones((LAYERS, 32), x.dtype))

    def test_unknown_names(self):
        x, stacks = operands(8, 16, 64, 1)
        with pytest.raises(NotImplementedError, match="no implementation 'other'"):
            skinny_matmul(x, stacks, implementation="other")  # pyright: ignore[reportArgumentType]


class TestChoice:
    @pytest.fixture
    def chosen(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The forms that were asked to multiply."""
        from jdllm.pallas.skinny_matmul import mosaic_gpu

        names: list[str] = []
        forms = [
            (mosaic_gpu, "skinny_matmul_mosaic_gpu", "mosaic_gpu"),
            (xla, "skinny_matmul_xla", "xla"),
        ]
        for module, function, name in forms:
            monkeypatch.setattr(module, function, lambda *_, name=name, **__: names.append(name) or ())
        return names

    @staticmethod
    def call(dtype=jnp.bfloat16, implementation: Implementation | None = None) -> None:
        x, stacks = operands(8, 16, 64, 1, dtype=dtype)
        assert skinny_matmul(x, stacks, implementation=implementation) == ()

    @pytest.mark.parametrize(
        ("device", "dtype", "form"),
        [
            (Target(True, 9.0), jnp.bfloat16, "mosaic_gpu"),
            (Target(True, None), jnp.float16, "mosaic_gpu"),
            (Target(True, 9.0, triton=False), jnp.float32, "xla"),
            (Target(True, 8.0, triton=False), jnp.bfloat16, "xla"),
            (Target(False, None), jnp.bfloat16, "xla"),
        ],
    )
    def test_by_default_the_kernel_where_it_can_run(self, chosen, monkeypatch, device, dtype, form):
        monkeypatch.setattr(api, "target", lambda: device)
        self.call(dtype)
        assert chosen == [form]

    @pytest.mark.parametrize(
        ("device", "dtype", "reason"),
        [
            (Target(True, 8.0), jnp.bfloat16, "Hopper only"),
            (Target(False, None), jnp.bfloat16, "Hopper only"),
            (Target(True, 9.0), jnp.float32, "not of float32"),
        ],
    )
    def test_a_choice_that_cannot_run(self, chosen, monkeypatch, device, dtype, reason: str):
        monkeypatch.setattr(api, "target", lambda: device)
        with pytest.raises(NotImplementedError, match=reason):
            self.call(dtype, "mosaic_gpu")
        assert not chosen

    def test_an_explicit_choice_is_made(self, chosen, monkeypatch):
        monkeypatch.setattr(api, "target", lambda: Target(True, 9.0))
        for form in ("mosaic_gpu", "xla"):
            self.call(implementation=form)
        assert chosen == ["mosaic_gpu", "xla"]
