"""Split-S attention against float64: the portable forms, and the Hopper kernel in interpret mode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.pallas.attention import AttentionOutput, attention, merge
from jdllm.pallas.device import Target
from jdllm.pallas.hopper import PROCESSORS, SHARED_BYTES
from jdllm.pallas.split_attention import (
    FRESH_UNIT,
    PageTable,
    api,
    dense_table,
    split_attention,
    with_fresh_rows,
)
from jdllm.pallas.split_attention.limits import check_mosaic_gpu
from jdllm.pallas.split_attention.mosaic_gpu import split_attention_mosaic_gpu
from jdllm.pallas.split_attention.tiles import Tiles, default_tiles
from jdllm.pallas.split_attention.types import request_of
from jdllm.pallas.split_attention.xla import split_attention_xla
from tests.pallas.split_cases import Case, case, check, keys_of, oracle, rounded, with_fresh

BF16, F32 = 2e-2, 1e-5
RAGGED = [[64, 10, 64], [], [0, 33], [1]]
FRESH = [70, 5, 0, 20]
SMALL = Tiles(stages=2, min_tiles=1, processors=2)
# A name for each cut that differs in how it shares out rows or keys.
CUTS = {
    "one": SMALL,
    "turns": dataclasses.replace(SMALL, key_groups=2),
    "wide": dataclasses.replace(SMALL, step_tiles=2),
    "rows": dataclasses.replace(SMALL, row_groups=2),
    "blocks": dataclasses.replace(SMALL, row_blocks=2, processors=4),
    "four blocks": dataclasses.replace(SMALL, row_blocks=4, processors=4),
    "all": Tiles(row_groups=2, row_blocks=2, step_tiles=2, stages=2, min_tiles=3, processors=6),
}


def slow(*values: object):
    """A case for the longer lane: interpreting a kernel takes seconds."""
    return pytest.param(*values, marks=pytest.mark.slow)


def run(c: Case, implementation, **changes) -> AttentionOutput:
    operands = c._replace(**changes)
    return split_attention(*operands[:4], layer=operands.layer, scale=c.scale, implementation=implementation)


def kernel(c: Case, tiles: Tiles | None, fresh=None, unit: int = FRESH_UNIT) -> AttentionOutput:
    return split_attention_mosaic_gpu(
        *c[:4], fresh=fresh, fresh_unit=unit, layer=c.layer, scale=c.scale, tiles=tiles
    )


class TestPortable:
    @pytest.mark.parametrize("implementation", ["reference", "xla"])
    @pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(2, 2, 5), (6, 2, 3)])
    def test_ragged_requests(self, implementation, heads: int, kv_heads: int, queries: int):
        c = case(RAGGED, heads=heads, kv_heads=kv_heads, queries=queries, dtype=jnp.float32)
        actual = run(c, implementation)
        check(actual, oracle(c), F32)
        assert not np.asarray(actual.o[1]).any()
        assert np.isneginf(actual.m[1]).all()

    @pytest.mark.parametrize("implementation", ["reference", "xla"])
    def test_pages_in_8_bits_beside_fresh_rows(self, implementation):
        bare = case(RAGGED, heads=6, kv_heads=2, queries=3, dtype=jnp.float32)
        c, fresh, seen = with_fresh(bare, FRESH)
        stands_for, pools = rounded(bare)
        options = {"layer": c.layer, "scale": c.scale, "implementation": implementation}
        actual = split_attention(c.q, *pools, c.table, fresh=fresh, **options)
        check(actual, oracle(stands_for, seen), F32)

    @pytest.mark.parametrize("keys", [slow(64), 128, slow(1024)])
    def test_runs_of_pages(self, keys: int):
        c = case([[64] * 5, [7, 64, 3]], dtype=jnp.float32)
        check(split_attention_xla(*c[:4], layer=c.layer, scale=c.scale, keys=keys), oracle(c), F32)

    def test_the_default_off_a_hopper_card_is_xla(self):
        c = case(RAGGED)
        for default, xla in zip(run(c, None), run(c, "xla"), strict=True):
            np.testing.assert_array_equal(default, xla)

    def test_the_default_on_a_hopper_card_is_xla_where_no_kernel_can_run(self, monkeypatch):
        monkeypatch.setattr(api, "target", lambda: Target(True, 9.0, triton=False))
        c = case(RAGGED, dtype=jnp.float32)
        for default, xla in zip(run(c, None), run(c, "xla"), strict=True):
            np.testing.assert_array_equal(default, xla)
        with pytest.raises(NotImplementedError, match="not float32"):
            run(c, "mosaic_gpu")

    def test_a_traced_layer_and_a_traced_table(self):
        c = case(RAGGED, layers=3, dtype=jnp.float32)
        jitted = jax.jit(functools.partial(split_attention, scale=c.scale))
        for layer in range(3):
            check(jitted(*c[:4], layer=jnp.int32(layer)), oracle(c._replace(layer=layer)), F32)

    def test_rows_that_are_not_live_may_be_no_numbers(self):
        c = case([[5], [64]], dtype=jnp.float32)
        (page,) = np.asarray(c.table.pages[:1])
        v = c.v.at[:, page, :, 5:].set(jnp.nan)
        check(run(c, "xla", v=v), oracle(c), F32)

    @pytest.mark.slow
    def test_merged_with_a_fresh_block_it_is_attention_over_both(self):
        c = case([[64, 20], [9], []], queries=4, heads=4, kv_heads=2, dtype=jnp.float32)
        rng = np.random.default_rng(1)
        fresh_k, fresh_v = (rng.normal(size=(3, 4, 2, 64)) for _ in range(2))
        rows = np.arange(12, dtype=np.int32) // 4 * 4
        q, k, v = (jnp.asarray(x.reshape(12, *x.shape[2:]), jnp.float32) for x in (c.q, fresh_k, fresh_v))
        fresh = attention(q, k, v, rows, rows + 4, scale=c.scale, implementation="reference")
        cached = AttentionOutput(*(x.reshape(12, *x.shape[2:]) for x in run(c, "xla")))
        both = AttentionOutput(*(x.reshape(3, 4, *x.shape[1:]) for x in merge([cached, fresh])))
        check(both, oracle(c, (fresh_k, fresh_v)), F32)

    @pytest.mark.slow
    @pytest.mark.parametrize("implementation", ["reference", "xla"])
    @pytest.mark.parametrize("page_rows", [slow(64), 128])
    def test_fresh_rows_of_the_table_count_as_cached_ones(self, implementation, page_rows: int):
        c = case(RAGGED, heads=4, kv_heads=2, page_rows=page_rows, dtype=jnp.float32)
        bare, (c, fresh, seen) = c, with_fresh(c, FRESH)
        actual = split_attention(
            *c[:4], fresh=fresh, layer=c.layer, scale=c.scale, implementation=implementation
        )
        check(actual, oracle(bare, seen), F32)

    @pytest.mark.parametrize("implementation", ["reference", "xla"])
    @settings(max_examples=6)
    @given(st.data())
    @pytest.mark.slow
    def test_few_fresh_rows_of_many_requests_lie_close_together(self, implementation, data: st.DataObject):
        unit = data.draw(st.sampled_from([1, 2, 4]))
        fresh_counts = [*data.draw(st.lists(st.integers(0, unit), max_size=11)), unit]
        counts = [data.draw(st.lists(st.integers(0, 64), max_size=2)) for _ in fresh_counts]
        c = case(counts, heads=4, kv_heads=2, queries=1, dtype=jnp.float32)
        bare, (c, fresh, seen) = c, with_fresh(c, fresh_counts, unit)
        actual = split_attention(
            *c[:4],
            fresh=fresh,
            fresh_unit=unit,
            layer=c.layer,
            scale=c.scale,
            implementation=implementation,
        )
        check(actual, oracle(bare, seen), F32)


class TestPages:
    def test_fresh_rows_begin_at_whole_blocks(self):
        table = PageTable(*(np.array(x, np.int32) for x in ([3], [64], [0, 1])))
        with pytest.raises(ValueError, match="multiples of 8, not at"):
            with_fresh_rows(table, np.array([4]), np.array([8]), 64)

    def test_the_order_of_pages_in_the_pool_does_not_matter(self):
        """Four scattered segments against the same rows in contiguous pages."""
        c = case([[64, 64, 20, 64, 1, 64, 64, 9]], dtype=jnp.float32)
        k, v = (np.moveaxis(x, 0, 1) for x in keys_of(c, 0))
        length, pages = k.shape[1], 6
        pools = np.zeros((2, 1, pages, 1, 64, 64), np.float32)
        for pool, rows in zip(pools, (k, v), strict=True):
            for at in range(0, length, 64):
                pool[0, at // 64, :, : length - at] = rows[:, at : at + 64]
        table = dense_table(np.array([length], np.int32), pages, 64)
        contiguous = run(c, "xla", k=jnp.asarray(pools[0]), v=jnp.asarray(pools[1]), table=table, layer=0)
        scattered = run(c, "xla")
        for a, b in zip(contiguous, scattered, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)

    @settings(max_examples=15)
    @given(st.lists(st.integers(0, 300), min_size=2, max_size=3), st.sampled_from([64, 320]))
    def test_dense_table(self, lengths: list[int], page_rows: int):
        per_request = -(-300 // page_rows)
        table = PageTable(*map(np.asarray, dense_table(np.array(lengths, np.int32), per_request, page_rows)))
        assert len(table.pages) == len(lengths) * per_request
        for r, length in enumerate(lengths):
            owned = slice(table.first[r], table.first[r + 1])
            expected = [min(page_rows, length - at) for at in range(0, length, page_rows)]
            assert table.valid[owned].tolist() == expected
            np.testing.assert_array_equal(table.pages[owned], r * per_request + np.arange(len(expected)))

    def test_the_owner_of_an_entry_skips_empty_requests(self):
        first = np.array([0, 0, 2, 2, 3, 3], np.int32)
        np.testing.assert_array_equal(request_of(jnp.arange(5), first), [1, 1, 3, 4, 4])


class TestKernel:
    """In interpret mode with the race detector; the products alone are not those of the card."""

    @pytest.fixture(autouse=True)
    def _interpreted(self, interpreted: None):
        pass

    @pytest.mark.parametrize(
        "cut", ["one", slow("turns"), slow("wide"), slow("rows"), slow("blocks"), slow("all")]
    )
    def test_ragged_requests(self, cut: str):
        c = case(RAGGED, queries=8, heads=4, kv_heads=2)
        check(kernel(c, CUTS[cut]), oracle(c), BF16)

    @pytest.mark.parametrize(
        ("cut", "queries", "heads"),
        [
            slow("rows", 8, 9),
            slow("blocks", 24, 4),
            slow("all", 24, 10),
            slow("all", 40, 5),
            slow("four blocks", 40, 6),
            slow("all", 8, 32),
        ],
    )
    def test_many_rows(self, cut: str, queries: int, heads: int):
        c = case([[64, 5, 64, 30]], queries=queries, heads=heads)
        check(kernel(c, CUTS[cut]), oracle(c), BF16)

    @pytest.mark.slow
    @pytest.mark.parametrize("cut", ["wide", slow("one"), slow("blocks"), slow("all")])
    def test_fresh_rows(self, cut: str):
        c = case(RAGGED, heads=4, kv_heads=2)
        bare, (c, fresh, seen) = c, with_fresh(c, FRESH)
        check(kernel(c, CUTS[cut], fresh), oracle(bare, seen), BF16)

    @pytest.mark.parametrize("cut", [slow("wide"), slow("one"), slow("turns")])
    def test_pages_of_many_tiles_with_dead_ones_inside(self, cut: str):
        c = case([[192, 70, 0, 64], [1, 192]], page_rows=192)
        check(kernel(c, CUTS[cut]), oracle(c), BF16)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("cut", "heads", "kv_heads", "unit"),
        [
            ("one", 8, 2, 1),
            slow("turns", 6, 2, 1),
            slow("wide", 7, 1, 2),
            slow("rows", 2, 2, 1),
            slow("blocks", 70, 1, 4),
            slow("all", 20, 4, 1),
        ],
    )
    def test_a_query_of_each_request_and_its_fresh_row(self, cut: str, heads: int, kv_heads: int, unit: int):
        """Memory that nobody has written is no number here."""
        c = case([[64, 10], [], [0, 33], [1], [64], [5]], queries=1, heads=heads, kv_heads=kv_heads)
        bare, (c, fresh, seen) = c, with_fresh(c, [1, 1, unit, 0, 1, 1], unit)
        check(kernel(c, CUTS[cut], fresh, unit), oracle(bare, seen), BF16)

    def test_short_blocks_and_their_own_rows(self):
        c = case([[64, 20], [9], [], [64]], queries=4, heads=8, kv_heads=2)
        bare, (c, fresh, seen) = c, with_fresh(c, [4, 4, 4, 4], 4)
        check(kernel(c, SMALL, fresh, 4), oracle(bare, seen), BF16)

    @pytest.mark.slow
    @settings(max_examples=6)
    @given(st.data())
    def test_any_requests_of_a_query(self, data: st.DataObject):
        group, unit = data.draw(st.sampled_from([1, 2, 3, 4, 7, 8])), data.draw(st.sampled_from([1, 2]))
        fresh_counts = [*data.draw(st.lists(st.integers(0, unit), max_size=9)), unit]
        counts = [data.draw(st.lists(st.integers(0, 64), max_size=2)) for _ in fresh_counts]
        c = case(counts, queries=1, heads=2 * group, kv_heads=2)
        bare, (c, fresh, seen) = c, with_fresh(c, fresh_counts, unit)
        check(kernel(c, SMALL, fresh, unit), oracle(bare, seen), BF16)

    @pytest.mark.slow
    @pytest.mark.parametrize("queries", [1, 5, 17])
    def test_queries_that_fill_no_block_of_shared_memory(self, queries: int):
        c = case([[64, 9], [3]], queries=queries, heads=2, kv_heads=2)
        check(kernel(c, SMALL), oracle(c), BF16)

    @pytest.mark.slow
    def test_wide_heads_and_float16(self):
        c = case([[64, 9], [3]], head_dim=128, dtype=jnp.float16)
        check(kernel(c, None), oracle(c), BF16)

    @pytest.mark.slow
    def test_a_worker_for_each_tile(self):
        c = case([[64] * 3, [64] * 2])
        check(kernel(c, dataclasses.replace(SMALL, processors=9)), oracle(c), BF16)

    @pytest.mark.slow
    @pytest.mark.parametrize("pages", [8, 17])
    def test_many_workers_on_each_head_that_keep_step_or_do_not(self, pages: int):
        """16 of 17 take a tile each, or all of them two."""
        c = case([[64] * (pages - 1) + [17]], heads=4, kv_heads=2)
        check(kernel(c, dataclasses.replace(SMALL, processors=17)), oracle(c), BF16)

    @pytest.mark.slow
    def test_no_keys_at_all(self):
        c = case([[], [0]])
        actual = kernel(c, SMALL)
        check(actual, oracle(c), BF16)
        assert np.isneginf(actual.m).all()

    @pytest.mark.slow
    def test_a_traced_layer(self):
        c = case([[64, 9]], layers=3)
        jitted = jax.jit(lambda layer: kernel(c._replace(layer=layer), SMALL))
        for layer in range(3):
            check(jitted(jnp.int32(layer)), oracle(c._replace(layer=layer)), BF16)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"dtype": jnp.float32}, "not float32 and float32"),
            ({"head_dim": 32}, r"heads of \(64, 128\), not of 32"),
            ({"queries": 74, "heads": 7}, "at most 512 rows of queries per key-value head, not 560"),
        ],
    )
    def test_the_limits_of_the_kernel(self, change: dict, reason: str):
        c = case([[1]], **change)
        with pytest.raises(NotImplementedError, match=reason):
            check_mosaic_gpu(c.q, c.k)

    def test_fresh_rows_have_the_type_of_the_queries_where_the_pool_has_8_bits(self):
        c, pools = rounded(case([[1]]))
        fresh = jnp.zeros((8, 1, 64), jnp.float32)
        with pytest.raises(ValueError, match=r"fresh rows float32 .* queries bfloat16"):
            split_attention(c.q, *pools, c.table, fresh=(fresh, fresh), scale=1.0)

    def test_the_kernel_is_for_hopper(self):
        with pytest.raises(NotImplementedError, match="Hopper only"):
            run(case([[1]]), "mosaic_gpu")

    def test_unknown_names(self):
        with pytest.raises(NotImplementedError, match="no implementation 'other'"):
            run(case([[1]]), "other")

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"q": jnp.zeros((1, 8, 3, 32))}, "3 query heads of 32 do not fit 1 key-value heads of 64"),
            ({"v": jnp.zeros((2, 2, 1, 64, 32))}, "differ"),
            ({"q": jnp.zeros((2, 8, 2, 64))}, "does not fit 2 requests"),
            (dict.fromkeys("kv", jnp.zeros((2, 2, 1, 96, 64))), "multiple of 64 rows, not 96"),
        ],
    )
    def test_shapes_that_do_not_fit(self, change: dict, reason: str):
        with pytest.raises(ValueError, match=reason):
            run(case([[1]]), None, **change)

    @pytest.mark.parametrize("unit", [0, 3, 16])
    def test_units_of_fresh_rows(self, unit: int):
        with pytest.raises(ValueError, match=f"divisors of 8, not {unit}"):
            split_attention(*case([[1]])[:4], fresh_unit=unit, scale=1.0)

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
    def test_scales(self, scale: float):
        with pytest.raises(ValueError, match="positive"):
            run(case([[1]])._replace(scale=scale), "xla")

    @pytest.mark.parametrize(
        ("cut", "reason"),
        [
            ({"row_groups": 2, "key_groups": 2}, "at most 2 consumers, not 4"),
            ({"step_tiles": 3}, "not 3"),
            ({"key_groups": 2, "stages": 3}, "cannot share 3 stages"),
        ],
    )
    def test_cuts(self, cut: dict, reason: str):
        with pytest.raises(NotImplementedError, match=reason):
            Tiles(**cut)

    def test_a_cut_that_is_too_small(self):
        with pytest.raises(NotImplementedError, match="64 rows cannot take 72"):
            kernel(case([[1]], heads=9), SMALL)

    def test_a_table_whose_tiles_cannot_be_counted(self):
        entries = 2**31 // (32 * PROCESSORS) + 1
        table = PageTable(np.zeros(entries, np.int32), np.ones(entries, np.int32), np.array([0, entries]))
        with pytest.raises(NotImplementedError, match=f"at most {entries - 1} entries, not {entries}"):
            kernel(case([[1]], heads=32, kv_heads=32)._replace(table=table), None)

    def test_a_cut_that_does_not_fit_shared_memory(self):
        with pytest.raises(NotImplementedError, match="14 stages need"):
            kernel(case([[1]]), Tiles(stages=14))


@given(st.integers(1, 512), st.sampled_from([64, 128]), st.booleans())
def test_default_cuts_fit_the_card(rows: int, head_dim: int, in_8_bits: bool):
    tiles = default_tiles(rows, head_dim, in_8_bits)
    assert tiles.rows >= rows
    assert tiles.shared_bytes(head_dim) <= SHARED_BYTES
    in_flight = tiles.shared_bytes(head_dim) - 2 * head_dim * tiles.block_rows
    assert in_flight >= 160 * 1024
    assert (tiles.registers is None) == (tiles.consumers == 1)
    if tiles.registers is not None:
        loader, consumer, *others = tiles.registers
        initial = {3: 168, 4: 128}[tiles.consumers + 1 + len(others)]
        asked_for = loader + tiles.consumers * consumer + sum(others)
        assert asked_for <= (tiles.consumers + 1 + len(others)) * initial
