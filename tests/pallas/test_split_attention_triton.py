"""The Triton kernel of Split-S attention against float64, in Triton's interpreter, and where it is chosen."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas import dispatch
from jdllm.pallas.attention import AttentionOutput
from jdllm.pallas.device import Target
from jdllm.pallas.dispatch import choices
from jdllm.pallas.split_attention import PageTable, api, split_attention
from jdllm.pallas.triton_launch import Schedule
from tests.helpers import slow
from tests.pallas.split_cases import Case, case, check, oracle, rounded, with_fresh
from tests.pallas.triton_interpreter import interpreted

RAGGED = [[64, 64, 3], [], [1], [64, 17, 64, 64, 40]]
FRESH = [5, 0, 64, 33]
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 2e-3}


@pytest.fixture(scope="module")
def form() -> Iterator[Any]:
    """The module of the form, whose kernel is interpreted: programs take long, so requests have few parts."""
    with pytest.MonkeyPatch.context() as patch:
        for form in interpreted("split_attention"):
            patch.setattr(form, "PROGRAMS", 16)
            yield form


def run(form: Any, c: Case, rows: int = 16, keys: int = 32, **options: Any) -> AttentionOutput:
    sizes = form.Sizes(rows, keys, Schedule(4, 2))
    return form.split_attention_triton(*c[:4], layer=c.layer, scale=c.scale, sizes=sizes, **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "dtype"),
    [
        (2, 2, 1, jnp.float32),
        (6, 2, 3, jnp.float32),
        (4, 1, 8, jnp.float32),
        (6, 2, 3, jnp.bfloat16),
        (6, 2, 3, jnp.float16),
    ],
)
def test_ragged_requests(form: Any, dtype: Any, heads: int, kv_heads: int, queries: int):
    c = case(RAGGED, heads=heads, kv_heads=kv_heads, queries=queries, dtype=dtype)
    actual = run(form, c)
    check(actual, oracle(c), TOLERANCE[dtype.__name__])
    assert actual.o.dtype == dtype
    assert not np.asarray(actual.o[1], np.float32).any()
    assert np.isneginf(actual.m[1]).all()
    assert not np.asarray(actual.l[1]).any()


@pytest.mark.parametrize("dtype", ["float32", *map(slow, ("bfloat16", "float16"))])
def test_pages_in_8_bits_beside_fresh_rows(form: Any, dtype: str):
    bare = case(RAGGED, heads=6, kv_heads=2, queries=3, dtype=jnp.dtype(dtype))
    c, fresh, seen = with_fresh(bare, FRESH)
    stands_for, (k, v) = rounded(bare)
    actual = run(form, c._replace(k=k, v=v), fresh=fresh)  # type: ignore[arg-type]
    check(actual, oracle(stands_for, seen), TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("programs", [*map(slow, (1, 10_000)), 12])
def test_parts_of_a_request_are_one(form: Any, programs: int, monkeypatch: pytest.MonkeyPatch):
    """As many as keep a card busy, also more than a request has entries."""
    monkeypatch.setattr(form, "PROGRAMS", programs)
    c = case(RAGGED, heads=4, kv_heads=2, queries=2, dtype=jnp.float32)
    check(run(form, c), oracle(c), TOLERANCE["float32"])


@pytest.mark.parametrize(("page_rows", "keys"), [(64, 64), (128, 32), (192, 64)])
def test_pages_and_blocks(form: Any, page_rows: int, keys: int):
    c = case([[page_rows, 1], [page_rows - 1]], page_rows=page_rows, dtype=jnp.float32)
    check(run(form, c, keys=keys), oracle(c), TOLERANCE["float32"])


@pytest.mark.parametrize("head_dim", [80, *map(slow, (8, 128))])
def test_head_sizes(form: Any, head_dim: int):
    c = case([[64, 9]], head_dim=head_dim, dtype=jnp.float32)
    check(run(form, c), oracle(c), TOLERANCE["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("page_rows", [slow(64), 128])
def test_fresh_rows_of_the_table_count_as_cached_ones(form: Any, page_rows: int):
    c = case(RAGGED, heads=4, kv_heads=2, page_rows=page_rows, dtype=jnp.float32)
    bare, (c, fresh, seen) = c, with_fresh(c, FRESH)
    check(run(form, c, fresh=fresh), oracle(bare, seen), TOLERANCE["float32"])


@pytest.mark.parametrize("unit", [slow(1), 2, slow(4)])
def test_few_fresh_rows_lie_close_together(form: Any, unit: int):
    c = case(RAGGED, heads=4, kv_heads=2, dtype=jnp.float32)
    bare, (c, fresh, seen) = c, with_fresh(c, [unit, 0, 1, unit], unit)
    check(run(form, c, fresh=fresh, fresh_unit=unit), oracle(bare, seen), TOLERANCE["float32"])


def test_rows_that_are_not_live_may_be_no_numbers(form: Any):
    c = case([[5], [64]], dtype=jnp.float32)
    (page,) = np.asarray(c.table.pages[:1])
    k, v = (pool.at[:, page, :, 5:].set(jnp.nan) for pool in (c.k, c.v))
    check(run(form, c._replace(k=k, v=v)), oracle(c), TOLERANCE["float32"])


@pytest.mark.parametrize("capability", [8.0, 8.6, 8.9, 9.0, 10.0, 12.0, 99.0])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_card_has_sizes_for_every_head(form: Any, itemsize: int, capability: float):
    for head_dim in range(1, 257):
        rows, keys, _ = form.sizes_for(head_dim, itemsize, capability)
        assert min(rows, keys) >= 16


@pytest.mark.parametrize(
    ("q", "pool", "reason"),
    [
        (jnp.zeros((1, 1, 1, 64)), jnp.zeros((1, 1, 1, 64, 64), jnp.bfloat16), "not float32 and bfloat16"),
        (jnp.zeros((1, 1, 1, 264)), jnp.zeros((1, 1, 1, 64, 264)), "up to 256, not of 264"),
    ],
)
def test_names_the_limit(form: Any, q: Any, pool: Any, reason: str):
    with pytest.raises(NotImplementedError, match=reason):
        form.split_attention_triton(q, pool, pool, PageTable(*np.zeros((3, 2), np.int32)), scale=1.0)


def test_cards_before_ada_read_no_pool_in_8_bits(form: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.pallas.split_attention.limits.target", lambda: Target(True, 8.6))
    c, (k, v) = rounded(case([[5]]))
    with pytest.raises(
        NotImplementedError, match=r"a pool in 8 bits on cards from Ada on \(8.9\), not on 8.6"
    ):
        run(form, c._replace(k=k, v=v))  # type: ignore[arg-type]


class TestChoice:
    @pytest.fixture
    def on(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(dispatch, "noted", {})

        def pretend(capability: float) -> None:
            monkeypatch.setattr(api, "target", lambda: Target(True, capability))

        return pretend

    def run(self, **options: Any) -> AttentionOutput:
        c = case(RAGGED, dtype=jnp.float32)
        return split_attention(*c[:4], layer=c.layer, scale=c.scale, **options)

    @pytest.mark.slow
    @pytest.mark.parametrize("capability", [slow(8.0), 9.0])
    def test_it_runs_where_no_other_kernel_can(self, on, form: Any, capability: float):
        on(capability)
        outputs = zip(*(self.run(implementation=f) for f in (None, "triton", "xla")), strict=True)
        for default, asked, portable in outputs:
            np.testing.assert_array_equal(default, asked)
            np.testing.assert_allclose(asked, portable, rtol=1e-5, atol=1e-6)
        assert choices()[0].form == "triton"

    def test_cards_before_ampere_do_not_have_it(self, on):
        on(7.5)
        with pytest.raises(NotImplementedError, match="of split attention runs on Ampere and newer"):
            self.run(implementation="triton")
