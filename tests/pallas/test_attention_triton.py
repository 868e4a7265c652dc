"""The Triton attention kernel against float64, in Triton's interpreter, and where it is chosen."""

import functools
import sys
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas import dispatch
from jdllm.pallas.attention import AttentionOutput, api, attention
from jdllm.pallas.device import Target
from jdllm.pallas.dispatch import Choice, choices
from jdllm.pallas.triton_launch import Schedule
from tests.helpers import slow
from tests.pallas.test_attention import KINDS, ROWS, SCALE, Inputs, inputs, oracle, ranges, segment_bounds
from tests.pallas.triton_interpreter import interpreted

A100, HOPPER, TURING = (Target(True, capability) for capability in (8.0, 9.0, 7.5))
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@pytest.fixture(scope="module")
def triton_form() -> Iterator:
    """The module of the form, whose kernels are interpreted."""
    yield from interpreted("attention")


@pytest.fixture
def attend(triton_form):
    sizes = triton_form.Sizes(rows=16, keys=16, schedule=Schedule(4, 2))
    return functools.partial(triton_form.attention_triton, scale=SCALE, sizes=sizes)


def rounded(x: Inputs, dtype) -> Inputs:
    return Inputs(*(np.asarray(jnp.asarray(a, dtype)) for a in x))


def check(attend, x: Inputs, start: np.ndarray, end: np.ndarray) -> None:
    actual = attend(*map(jnp.asarray, x), start, end)
    expected = oracle(x, start, end)
    assert actual.o.dtype == x.q.dtype
    assert actual.m.dtype == actual.l.dtype == jnp.float32
    np.testing.assert_allclose(actual.m, expected.m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual.l, expected.l, rtol=1e-5)
    # Probabilities and output are each rounded; the interpreter drops the bits that bfloat16 does not have.
    bound = max(5e-6, float(jnp.finfo(x.q.dtype).eps) * np.abs(np.asarray(x.v, np.float64)).max())
    np.testing.assert_allclose(np.asarray(actual.o, np.float64), expected.o, atol=bound)


@pytest.mark.parametrize(
    "kind", [kind if kind in ("packed", "causal", "all_empty") else slow(kind) for kind in KINDS]
)
def test_equals_float64(attend, kind: str):
    check(attend, inputs(ROWS, ROWS, 4, 2), *ranges(kind, ROWS, ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DTYPES[1], slow(DTYPES[2])])
def test_sixteen_bits(attend, dtype):
    for kind in ("packed", "sliding"):
        check(attend, rounded(inputs(ROWS, ROWS, 4, 2, 64), dtype), *ranges(kind, ROWS, ROWS))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (6, 1)])
def test_query_heads_share_key_heads_in_order(attend, heads: int, kv_heads: int):
    check(attend, inputs(20, 20, heads, kv_heads), *ranges("causal", 20, 20))


@pytest.mark.parametrize("head_dim", [3, 80, *map(slow, (16, 24, 96, 256))])
def test_any_size_of_heads(attend, head_dim: int):
    check(attend, inputs(20, 37, 2, 1, head_dim), *ranges("sliding", 20, 37))


@pytest.mark.parametrize(("rows", "keys"), [(33, 1), slow(1, 37), slow(16, 17), slow(48, 31)])
def test_any_number_of_rows_and_keys(attend, rows: int, keys: int):
    for kind in ("full", "sliding", "causal"):
        check(attend, inputs(rows, keys, 2, 1), *ranges(kind, rows, keys))


@pytest.mark.slow
def test_other_cuts(attend, triton_form):
    x, bounds = inputs(150, 150, 2, 1), segment_bounds([37, 1, 90, 5], 150)
    for rows, keys in ((32, 16), (16, 64), (64, 32)):
        sizes = triton_form.Sizes(rows, keys, Schedule(4, 2))
        check(functools.partial(attend, sizes=sizes), x, *bounds)


@pytest.mark.slow
def test_any_ranges(attend):
    rng = np.random.default_rng(3)
    for _ in range(5):
        start, end = np.sort(rng.integers(0, ROWS + 1, (ROWS, 2)).astype(np.int32), axis=1).T
        check(attend, inputs(ROWS, ROWS, 2, 1), start, end)


def test_bounds_beyond_the_keys_are_cut_off(attend):
    x = inputs(20, 30, 2, 1)
    wide = attend(*map(jnp.asarray, x), np.full(20, -5, np.int32), np.full(20, 99, np.int32))
    for a, b in zip(wide, attend(*map(jnp.asarray, x), *ranges("full", 20, 30)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # of the interpreter
def test_what_no_row_of_a_block_sees_is_not_read(attend):
    """NaN does not matter there, nor in rows that see nothing."""
    x, (start, end) = inputs(ROWS, ROWS, 2, 1), segment_bounds([11, 17], ROWS)
    start[:11] = end[:11] = 0
    live = start < end
    clean: AttentionOutput = attend(*map(jnp.asarray, x), start, end)
    for a in x:
        a[~live] = np.nan
    dirty = attend(*map(jnp.asarray, x), start, end)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(dirty.o)[~live] == 0).all()
    assert np.isneginf(np.asarray(dirty.m)[~live]).all()
    assert (np.asarray(dirty.l)[~live] == 0).all()


def test_garbage_between_the_segments_of_a_block_does_not_matter(attend):
    x, (start, end) = inputs(ROWS, ROWS, 2, 1), segment_bounds([11, 17, 22], ROWS)
    start[11:28] = end[11:28] = 0
    clean = attend(*map(jnp.asarray, x), start, end)
    x.k[11:28], x.v[11:28] = 1e30, 1e30
    for a, b in zip(clean, attend(*map(jnp.asarray, x), start, end), strict=True):
        np.testing.assert_array_equal(a, b)


def test_large_scores_do_not_overflow(attend):
    x = inputs(20, 20, 2, 2)
    x.q[:] *= 1000
    bounds = ranges("full", 20, 20)
    actual, expected = attend(*map(jnp.asarray, x), *bounds), oracle(x, *bounds)
    np.testing.assert_allclose(actual.m, expected.m, rtol=1e-6)
    np.testing.assert_allclose(actual.o, expected.o, atol=1e-3)  # scores of 1000 have an f32 ulp of 6e-5


@pytest.mark.parametrize(
    ("dtype", "head_dim", "scale", "reason"),
    [
        (jnp.float8_e4m3fn, 64, 1.0, "not float8_e4m3fn"),
        (jnp.bfloat16, 257, 1.0, "up to 256, not of 257"),
        (jnp.bfloat16, 64, 0.0, "above 0"),
    ],
)
def test_names_the_limit(triton_form, dtype, head_dim: int, scale: float, reason: str):
    q = jnp.ones((4, 1, head_dim), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        triton_form.attention_triton(q, q, q, *ranges("full", 4, 4), scale=scale)


@pytest.mark.parametrize("capability", [8.0, 8.6, 8.9, 9.0, 10.0, 12.0, 99.0])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_card_has_sizes_for_every_head(triton_form, itemsize: int, capability: float):
    for head_dim in range(1, 257):
        rows, keys, _ = triton_form.sizes_for(head_dim, itemsize, capability)
        assert min(rows, keys) >= 16


class TestChoice:
    """Which form runs on which card, and what is said about it."""

    @pytest.fixture(autouse=True)
    def forgotten(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(dispatch, "noted", {})
        dispatch.log_once.cache_clear()

    @pytest.fixture
    def on(self, monkeypatch: pytest.MonkeyPatch):
        def pretend(target: Target) -> None:
            monkeypatch.setattr(api, "target", lambda platform: target)

        return pretend

    def run(self, head_dim: int = 64, **options) -> None:
        q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in inputs(4, 4, 2, 1, head_dim))
        attention(q, k, v, *ranges("full", 4, 4), scale=SCALE, **options)

    def test_it_runs_where_no_other_kernel_can(self, on, triton_form):
        on(A100)
        self.run()
        on(HOPPER)
        self.run(head_dim=80)
        assert [choice.form for choice in choices()] == ["triton"] * 2

    def test_it_runs_where_it_is_asked_for(self, on, triton_form):
        on(A100)
        self.run(implementation="triton")

    def test_it_runs_where_it_is_preferred(self, on, triton_form):
        on(HOPPER._replace(kernels="triton"))
        self.run()
        assert choices() == [Choice("attention", "triton", ())]

    def test_without_triton(self, on):
        on(A100._replace(triton=False))
        with pytest.raises(NotImplementedError, match="needs jax-triton, of the extras cuda12 and cuda13"):
            self.run(implementation="triton")

    def test_older_cards(self, on):
        on(TURING)
        with pytest.raises(NotImplementedError, match="runs on Ampere and newer cards only"):
            self.run(implementation="triton")

    @pytest.mark.parametrize("target", [Target(False, None), Target(True, None), TURING])
    def test_nothing_is_imported_where_it_cannot_run(
        self, monkeypatch: pytest.MonkeyPatch, on, target: Target
    ):
        on(target)
        monkeypatch.setitem(sys.modules, "triton", None)
        self.run(head_dim=96)
        assert choices()[0].form == "xla"
