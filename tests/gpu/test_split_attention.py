"""Split-S attention on a card against f32 of the highest precision. The implementation is always named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jdllm.pallas.attention import AttentionOutput
from jdllm.pallas.split_attention import FRESH_UNIT, PageTable, split_attention
from jdllm.pallas.split_attention.mosaic_gpu import split_attention_mosaic_gpu
from jdllm.pallas.split_attention.tiles import Tiles
from jdllm.stored_rows import Float8Rows
from tests.pallas.split_cases import BF16_RELATIVE, Case, case, relative, rounded, with_fresh

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


# Compiled whole: each of its operations would be compiled for itself.
exact = jax.jit(
    functools.partial(split_attention, implementation="reference"), static_argnames=("scale", "fresh_unit")
)


def check(
    c: Case,
    actual: AttentionOutput,
    fresh: tuple[jax.Array, jax.Array] | None = None,
    fresh_unit: int = FRESH_UNIT,
) -> None:
    """Arguments:
    - `c`: with the keys and values that a pool in 8 bits stands for.
    """
    expected = exact(*c[:4], fresh=fresh, fresh_unit=fresh_unit, layer=c.layer, scale=c.scale)
    some = np.asarray(expected.l) > 0
    assert relative(np.asarray(actual.o)[some], np.asarray(expected.o)[some]) < BF16_RELATIVE
    m, total, m_ref, total_ref = (np.asarray(x, np.float64) for x in (*actual[1:], *expected[1:]))
    np.testing.assert_allclose(m[some], m_ref[some], atol=1e-4)
    lse, lse_ref = (a[some] + np.log(b[some]) for a, b in ((m, total), (m_ref, total_ref)))
    np.testing.assert_allclose(lse, lse_ref, atol=1e-4)
    assert np.isneginf(m[~some]).all()
    assert (total[~some] == 0).all()
    assert (np.asarray(actual.o, np.float32)[~some] == 0).all()


def attend(c: Case, implementation: Any) -> AttentionOutput:
    return split_attention(*c[:4], layer=c.layer, scale=c.scale, implementation=implementation)


def lengths(counts: list[int], page_rows: int = 64) -> list[list[int]]:
    """Pages of requests with these many rows, in one segment each."""
    return [[min(page_rows, n - at) for at in range(0, n, page_rows)] for n in counts]


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (28, 4), (32, 4), (16, 16)])
def test_model_shapes(heads: int, kv_heads: int, implementation: str):
    c = case(lengths([4096]), queries=32, heads=heads, kv_heads=kv_heads, head_dim=128)
    check(c, attend(c, implementation))


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (12, 2), (28, 4)])
def test_a_block_and_the_row_before(heads: int, kv_heads: int, implementation: Any):
    """Models with shifted logits: more than 256 rows of queries share a key-value head."""
    bare = case(lengths([1, 3000, 0, 65]), queries=40, heads=heads, kv_heads=kv_heads, head_dim=128)
    c, fresh, _ = with_fresh(bare, [33, 7, 0, 100])
    actual = split_attention(*c[:4], fresh=fresh, layer=c.layer, scale=c.scale, implementation=implementation)
    check(c, actual, fresh)
    check(bare, attend(bare, implementation))


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 4), (28, 4)])
def test_ragged_requests(heads: int, kv_heads: int, implementation: str):
    counts = lengths([1, 3000, 0, 65, 64, 700, 0, 5000, 12])
    counts[1][7:12] = [3, 0, 64, 9, 1]
    c = case(counts, queries=32, heads=heads, kv_heads=kv_heads, head_dim=128, layers=3)
    check(c, attend(c, implementation))


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (28, 4)])
def test_fresh_rows(heads: int, kv_heads: int, implementation: Any):
    bare = case(lengths([1, 3000, 0, 65]), queries=32, heads=heads, kv_heads=kv_heads, head_dim=128)
    c, fresh, _ = with_fresh(bare, [32, 7, 0, 100])
    actual = split_attention(*c[:4], fresh=fresh, layer=c.layer, scale=c.scale, implementation=implementation)
    check(c, actual, fresh)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (12, 4), (32, 8), (28, 4), (71, 1)])
def test_a_query_of_each_request_and_its_fresh_row(heads: int, kv_heads: int, head_dim: int):
    counts = lengths([1, 3000, 0, 65, 64, 700, 0, 5000, 12, 1024] * 2)
    bare = case(counts, queries=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    c, fresh, _ = with_fresh(bare, [1] * len(counts), 1)
    options: Any = {"layer": c.layer, "scale": c.scale, "implementation": "mosaic_gpu"}
    check(c, split_attention(*c[:4], fresh=fresh, fresh_unit=1, **options), fresh, 1)
    check(bare, attend(bare, "mosaic_gpu"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("queries", [1, 16, 20, 64])
def test_queries_types_and_head_dims(queries: int, head_dim: int, dtype):
    c = case(lengths([900, 33]), queries=queries, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype)
    check(c, attend(c, "mosaic_gpu"))


@pytest.mark.parametrize("page_rows", [128, 192, 1024])
@pytest.mark.parametrize("heads", [4, 14])
def test_large_pages(page_rows: int, heads: int):
    counts = lengths([4000, 1, 2500], page_rows)
    c = case(counts, queries=32, heads=heads, kv_heads=2, head_dim=128, page_rows=page_rows)
    check(c, attend(c, "mosaic_gpu"))


@pytest.mark.parametrize(
    ("tiles", "heads"),
    [
        (Tiles(key_groups=2), 2),
        (Tiles(step_tiles=2, stages=3), 2),
        (Tiles(row_groups=2), 8),
        (Tiles(row_blocks=2), 8),
        (Tiles(row_groups=2, row_blocks=2), 14),
        (Tiles(min_tiles=1), 2),
        (Tiles(min_tiles=64), 2),
    ],
)
def test_cuts(tiles: Tiles, heads: int):
    c = case(lengths([3000, 0, 130, 900]), queries=32, heads=heads, kv_heads=2, head_dim=128)
    check(c, split_attention_mosaic_gpu(*c[:4], layer=c.layer, scale=c.scale, tiles=tiles))


def test_many_calls_in_a_row_agree_bit_by_bit():
    """What a race would spoil now and then; the order of sums does not depend on timing."""
    c = case(lengths([5000, 70, 1200]), queries=32, heads=28, kv_heads=4, head_dim=128)
    first = attend(c, "mosaic_gpu")
    for _ in range(50):
        for a, b in zip(first, attend(c, "mosaic_gpu"), strict=True):
            np.testing.assert_array_equal(a, b)


def test_pages_in_any_order_give_the_same_bits():
    c = case(lengths([5000]), queries=32, heads=8, kv_heads=8, head_dim=128)
    pages = np.asarray(c.table.pages)
    used = len(c.table.pages) - 2
    order = np.arange(c.k.shape[1])
    order[:used] = pages[:used]
    order[used:] = np.setdiff1d(np.arange(c.k.shape[1]), pages[:used])
    k, v = (pool[:, order] for pool in (c.k, c.v))
    in_order = PageTable(np.minimum(np.arange(len(pages)), used - 1).astype(np.int32), *c.table[1:])
    moved = c._replace(k=k, v=v, table=in_order)
    for a, b in zip(attend(c, "mosaic_gpu"), attend(moved, "mosaic_gpu"), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries"), [(8, 8, 32), (12, 4, 32), (28, 4, 32), (28, 4, 40)]
)
def test_a_pool_in_8_bits_beside_fresh_rows(heads: int, kv_heads: int, queries: int, head_dim: int):
    counts = lengths([1, 3000, 0, 65, 64, 700, 0, 5000, 12])
    counts[1][7:12] = [3, 0, 64, 9, 1]
    bare = case(counts, queries=queries, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    stands_for, pools = rounded(bare)
    options: Any = {"layer": bare.layer, "scale": bare.scale, "implementation": "mosaic_gpu"}
    check(stands_for, split_attention(bare.q, *pools, bare.table, **options))
    c, fresh, _ = with_fresh(bare, [32, 7, 0, 100, 1, 0, 5, 32, 64])
    check(
        stands_for._replace(table=c.table),
        split_attention(c.q, *pools, c.table, fresh=fresh, **options),
        fresh,
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (32, 8), (28, 4)])
def test_a_query_of_each_request_over_a_pool_in_8_bits(heads: int, kv_heads: int):
    counts = lengths([1, 3000, 0, 65, 64, 700, 0, 5000, 12, 1024] * 2)
    bare = case(counts, queries=1, heads=heads, kv_heads=kv_heads, head_dim=128)
    stands_for, pools = rounded(bare)
    c, fresh, _ = with_fresh(bare, [1] * len(counts), 1)
    options: Any = {"layer": c.layer, "scale": c.scale, "implementation": "mosaic_gpu"}
    actual = split_attention(c.q, *pools, c.table, fresh=fresh, fresh_unit=1, **options)
    check(stands_for._replace(table=c.table), actual, fresh, 1)


def test_numbers_of_8_bits_come_out_exactly():
    """All 254 of them, at each of the places that a thread loads at once, beside scales of every size."""
    numbers = np.delete(np.arange(256), [127, 255]).astype(np.uint8)
    sizes = np.exp2(np.arange(-90.0, 90.0, 12.0))
    counts = [[1]] * len(sizes)
    c = case(counts, head_dim=128)
    v = np.zeros(c.v.shape, np.uint8)
    for place in range(len(sizes)):
        v[:, c.table.pages[place]] = np.roll(np.resize(numbers, 128 * len(sizes)), place)[128 * place :][:128]
    scales = np.ones(c.v.shape[:-1])
    scales[:, np.asarray(c.table.pages[: len(sizes)])] = sizes[:, None, None]
    pool = Float8Rows(jnp.asarray(v.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scales, jnp.bfloat16))
    keys = Float8Rows(jnp.zeros_like(pool.values), pool.scales)
    o = split_attention(c.q, keys, pool, c.table, layer=c.layer, scale=c.scale, implementation="mosaic_gpu").o
    pages = np.asarray(c.table.pages[: len(sizes)])
    expected = v.view(ml_dtypes.float8_e4m3fn)[c.layer, pages, 0, 0].astype(np.float64) * sizes[:, None]
    np.testing.assert_array_equal(
        np.asarray(o, np.float64), np.broadcast_to(expected[:, None, None], o.shape)
    )


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(key_groups=2, stages=4, stored_stages=4),
        Tiles(stages=2, stored_stages=8),
        Tiles(row_groups=2, stages=3, stored_stages=5),
        Tiles(row_blocks=2, stages=3, stored_stages=6),
        Tiles(row_groups=2, row_blocks=2, stages=2, stored_stages=3, min_tiles=1),
    ],
)
def test_cuts_of_pools_in_8_bits(tiles: Tiles):
    c = case(lengths([3000, 0, 130, 900]), queries=32, heads=4, kv_heads=2, head_dim=128)
    stands_for, pools = rounded(c)
    run = functools.partial(split_attention_mosaic_gpu, layer=c.layer, scale=c.scale, tiles=tiles)
    first = run(c.q, *pools, c.table)
    check(stands_for, first)
    for _ in range(20):
        for a, b in zip(first, run(c.q, *pools, c.table), strict=True):
            np.testing.assert_array_equal(a, b)
