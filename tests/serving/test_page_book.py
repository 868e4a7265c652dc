"""Who holds which page of the KV pool, and where rows are written and read."""

import dataclasses
import random
from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jdllm.errors import JdllmError, KvPoolError
from jdllm.execution.paged.pool import empty_pool, pool_bytes, pool_shape
from jdllm.models.config import ModelConfig
from jdllm.pallas.split_attention import PageTable, split_attention
from jdllm.serving.pool.page_book import PageBook

ROWS = 64
"""Rows of a page, where a test needs no others."""

PROBE = -1
"""A request that is given all free pages to see which ones they are."""

Owned = dict[int, list[int]]


def held(pool: PageBook) -> Owned:
    return {request: pool.pages_of(request).tolist() for request in pool.owned}


def free(pool: PageBook) -> list[int]:
    """The free pages in the order in which they would be given out."""
    return pool.allocate(PROBE, pool.free_pages * pool.page_rows).pages_of(PROBE).tolist()


def pool_with(*rows: int, pages: int = 10) -> PageBook:
    """Requests 0, 1, ... with so many rows each, one after another."""
    pool = PageBook.empty(pages, ROWS)
    for request, count in enumerate(rows):
        pool = pool.allocate(request, count)
    return pool


class Model:
    """The same bookkeeping with lists and sets."""

    def __init__(self, pages: int):
        self.free = set(range(1, pages))
        self.kept: set[int] = set()
        self.owned: Owned = {}

    def unread(self) -> list[int]:
        """The pages that are kept and that no request holds."""
        return sorted(self.kept.difference(*self.owned.values()))

    def allocate(self, request: int, count: int, kept: list[int]) -> bool:
        """Give a request `count` pages, some of which are kept; whether that is possible."""
        own = count - len(kept)
        if request in self.owned or not 0 <= own <= len(self.free) or not self.kept.issuperset(kept):
            return False
        self.owned[request] = kept + sorted(self.free)[:own]
        self.free -= set(self.owned[request])
        return True

    def release(self, request: int, keep: list[int]) -> bool:
        """Free what a request holds, but for what is kept; whether that is possible."""
        if request not in self.owned or not set(keep) <= set(self.owned[request]):
            return False
        self.kept.update(keep)
        self.free |= set(self.owned.pop(request)) - self.kept
        return True

    def discard(self, pages: list[int]) -> bool:
        """Free what is kept; whether it is."""
        possible = self.kept.issuperset(pages)
        if possible:
            self.kept -= set(pages)
            self.free |= set(pages)
        return possible

    def check(self, pool: PageBook) -> None:
        own = [page for pages in held(pool).values() for page in pages if page not in self.kept]
        assert sorted([0, *free(pool), *self.kept, *own]) == list(range(pool.pages))
        assert held(pool) == self.owned
        assert free(pool) == sorted(self.free)


def some_of(pages: Iterable[int], rng: random.Random) -> list[int]:
    """Usually some of `pages`, otherwise any page."""
    chosen = [page for page in pages if rng.random() < 0.5]
    rng.shuffle(chosen)
    return chosen if rng.random() < 0.9 else [rng.randrange(24)]


def random_operation(pool: PageBook, model: Model, rng: random.Random) -> PageBook:
    """Do the same to both; where the model says that it cannot be, the pool must refuse."""
    request, count = rng.randrange(8), rng.choice([0, 1, 1, 2, 3, 5, 8])
    rows = max(count * ROWS - rng.randrange(ROWS), 0)
    what = rng.random()
    if what < 0.55:
        kept = some_of(model.kept, rng)[: rng.randrange(4)]
        possible = model.allocate(request, count, kept)
        operation = partial(pool.allocate, request, rows, kept)
    elif what < 0.85:
        keep = some_of(model.owned.get(request, []), rng) if rng.random() < 0.3 else []
        possible = model.release(request, keep)
        operation = partial(pool.release, request, keep)
    else:
        unread = model.unread()
        pages = [page for page in some_of(unread, rng) if page in unread or page not in model.kept]
        possible = model.discard(pages)
        operation = partial(pool.discard, pages)
    if possible:
        return operation()
    with pytest.raises(KvPoolError):
        operation()
    return pool


class TestPages:
    @pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
    def test_any_operations_keep_every_page_in_one_place(self, steps: int):
        rng = random.Random(0)
        pool, model = PageBook.empty(24, ROWS), Model(24)
        sampled: list[tuple[PageBook, Owned, list[int]]] = []
        refused = 0
        for step in range(steps):
            before, pool = pool, random_operation(pool, model, rng)
            refused += pool is before
            model.check(pool)
            if step % 1000 == 0:
                sampled.append((pool, held(pool), free(pool)))
        assert steps / 5 < refused < steps * 3 / 5
        for old, owned, left in sampled:
            assert held(old) == owned
            assert free(old) == left

    @pytest.mark.parametrize("pages", [511, 512, 513, 1500])
    def test_pages_of_large_pools(self, pages: int):
        pool = PageBook.empty(pages, ROWS)
        assert pool.free_pages == pages - 1
        pool = pool.allocate(0, 500 * ROWS).allocate(1, (pages - 501) * ROWS)
        assert pool.pages_of(1).tolist() == list(range(501, pages))
        assert pool.free_pages == 0
        assert free(pool.release(0)) == list(range(1, 501))
        assert free(pool.release(0).release(1)) == list(range(1, pages))

    def test_whole_pages_lowest_first(self):
        pool = pool_with(1, 2 * ROWS, 2 * ROWS + 1)
        assert held(pool) == {0: [1], 1: [2, 3], 2: [4, 5, 6]}
        pool = pool.release(1).release(0).allocate(7, 4 * ROWS)
        assert held(pool) == {2: [4, 5, 6], 7: [1, 2, 3, 7]}
        assert pool.free_pages == 2

    def test_a_request_may_hold_no_pages(self):
        pool = pool_with(0)
        assert held(pool) == {0: []}
        assert pool.release(0) == PageBook.empty(10, ROWS)

    def test_kept_pages_stay_and_come_first(self):
        pool = pool_with(3 * ROWS, ROWS).release(0, keep=[3, 1])
        assert free(pool) == [2, 5, 6, 7, 8, 9]
        pool = pool.allocate(2, 4 * ROWS, kept=[3, 1]).allocate(3, ROWS, kept=[3])
        assert held(pool) == {1: [4], 2: [3, 1, 2, 5], 3: [3]}
        assert pool.page_table([3, 2], [9, 4 * ROWS], 5).pages.tolist() == [3, 3, 1, 2, 5]
        pool = pool.release(2, keep=[5]).release(3)
        assert free(pool) == [2, 6, 7, 8, 9]
        assert free(pool.discard([5, 3])) == [2, 3, 5, 6, 7, 8, 9]
        assert pool.discard([1, 3, 5]).release(1) == PageBook.empty(10, ROWS)

    @pytest.mark.parametrize("page", [511, 512, 513])
    def test_kept_pages_of_large_pools(self, page: int):
        pool = pool_with(1499 * ROWS, pages=1500).release(0, keep=[page, 1024])
        assert free(pool) == sorted({*range(1, 1500)} - {page, 1024})
        pool = pool.discard([page])
        assert free(pool) == sorted({*range(1, 1500)} - {1024})
        assert pool.discard([1024]) == PageBook.empty(1500, ROWS)

    @pytest.mark.parametrize(("rows", "pages"), [(0, 0), (1, 1), (128, 1), (129, 2), (1280, 10)])
    def test_pages_for_rows(self, rows: int, pages: int):
        assert PageBook.empty(2, 128).pages_for(rows) == pages

    def test_a_pool_cannot_be_changed(self):
        pool = pool_with(ROWS)
        with pytest.raises(dataclasses.FrozenInstanceError):
            pool.pages = 3  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(TypeError, match="item assignment"):
            pool.owned[0] = b""  # pyright: ignore[reportIndexIssue]
        pages = pool.pages_of(0)
        assert pages.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            pages[0] = 3


def places(pool: PageBook, request: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The page of each row, and its row in that page."""
    row = np.arange(rows)
    return pool.pages_of(request)[row // pool.page_rows], row % pool.page_rows


class Rows(RuleBasedStateMachine):
    """Keys and values that are written row by row and read through page tables."""

    def __init__(self):
        super().__init__()
        self.page_rows = ROWS
        self.pool = PageBook.empty(9, self.page_rows)
        self.keys = np.zeros((2, self.pool.pages, 3, self.page_rows, 1))
        self.written: dict[int, np.ndarray] = {}
        self.fresh = 0

    def room(self, request: int) -> int:
        return len(self.pool.pages_of(request)) * self.page_rows

    def new_rows(self, count: int) -> np.ndarray:
        """Numbers that were never in the pool, `[2 layers, count, 3 heads, 1]`."""
        rows = self.fresh + np.arange(1.0, 2 * count * 3 + 1).reshape(2, count, 3, 1)
        self.fresh += rows.size
        return rows

    def write(self, page: np.ndarray, row: np.ndarray, rows: np.ndarray) -> None:
        for layer in range(2):
            self.keys[layer, page, :, row] = rows[layer]

    @rule(request=st.integers(0, 3), rows=st.integers(0, 4 * ROWS + 1))
    def allocate(self, request: int, rows: int):
        try:
            self.pool = self.pool.allocate(request, rows)
        except KvPoolError:
            assert request in self.written or self.pool.pages_for(rows) > self.pool.free_pages
            return
        self.written[request] = np.zeros((2, 0, 3, 1))

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        request = data.draw(st.sampled_from(sorted(self.written)))
        self.pool = self.pool.release(request)
        del self.written[request]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def write_rows(self, data: st.DataObject):
        request = data.draw(st.sampled_from(sorted(self.written)))
        count = data.draw(st.integers(0, self.room(request)))
        page, row = places(self.pool, request, count)
        rows = self.new_rows(count)
        self.write(page, row, rows)
        self.written[request] = np.concatenate([rows, self.written[request][:, count:]], axis=1)

    @rule(data=st.data(), spare=st.integers(0, 3))
    def read(self, data: st.DataObject, spare: int):
        requests = data.draw(st.permutations(sorted(self.written)))
        counts = [data.draw(st.integers(0, self.written[r].shape[1])) for r in requests]
        entries = sum(-(-count // self.page_rows) for count in counts)
        table = self.pool.page_table(requests, counts, entries + spare)
        assert isinstance(table, PageTable)
        assert [x.dtype for x in table] == [np.int32] * 3
        pages, valid, first = (np.asarray(x) for x in table)
        assert len(pages) == len(valid) == first[-1] + spare == entries + spare
        assert not pages[entries:].any()
        assert not valid[entries:].any()
        for i, (request, count) in enumerate(zip(requests, counts, strict=True)):
            own = range(first[i], first[i + 1])
            gathered = [self.keys[:, pages[e], :, : valid[e]].swapaxes(1, 2) for e in own]
            rows = np.concatenate([np.zeros((2, 0, 3, 1)), *gathered], axis=1)
            np.testing.assert_array_equal(rows, self.written[request][:, :count])

    @invariant()
    def row_i_is_in_page_i_over_page_rows(self):
        for request, rows in self.written.items():
            pages = self.pool.page_table([request], [rows.shape[1]], self.pool.pages).pages
            for i in {0, self.page_rows - 1, self.page_rows, rows.shape[1] - 1} & set(range(rows.shape[1])):
                found = self.keys[:, pages[i // self.page_rows], :, i % self.page_rows]
                np.testing.assert_array_equal(found, rows[:, i])


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=40, stateful_step_count=30)


class TestTables:
    def test_a_table_by_hand(self):
        pool = pool_with(100, 0, 130, ROWS)
        table = pool.page_table([2, 1, 0, 3], [129, 0, ROWS, ROWS], 7)
        assert table.pages.tolist() == [3, 4, 5, 1, 6, 0, 0]
        assert table.valid.tolist() == [64, 64, 1, 64, 64, 0, 0]
        assert table.first.tolist() == [0, 3, 3, 4, 5]

    def test_no_requests(self):
        pool = PageBook.empty(4, ROWS)
        assert [x.tolist() for x in pool.page_table([], [], 2)] == [[0, 0], [0, 0], [0]]

    def test_attention_reads_what_was_written(self, config: ModelConfig):
        """A request whose pages are scattered sees its own keys, as in a pool where they are in order."""
        config = dataclasses.replace(config, num_layers=2, num_kv_heads=2, head_dim=8)
        rng = np.random.default_rng(0)
        rows = 2 * ROWS + 9
        k, v = rng.normal(size=(2, 2, rows, 2, 8)).astype(np.float32)
        q = rng.normal(size=(1, 4, 4, 8)).astype(np.float32)

        def attend(pool: PageBook, request: int) -> np.ndarray:
            page, row = places(pool, request, rows)
            layers = np.arange(2)[:, None]
            keys, values = np.full((2, *pool_shape(config, pool.pages, ROWS)), 100.0, np.float32)
            keys[layers, page, :, row], values[layers, page, :, row] = k, v
            table = pool.page_table([request], [rows], 8)
            return np.asarray(jax.jit(partial(split_attention, layer=1, scale=1.0))(q, keys, values, table).o)

        scattered = pool_with(ROWS, ROWS, ROWS, ROWS).release(2).release(0).allocate(4, rows)
        assert scattered.pages_of(4).tolist() == [1, 3, 5]
        np.testing.assert_allclose(attend(scattered, 4), attend(pool_with(rows), 0), rtol=1e-5)


class TestBytes:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("page_rows", [64, 320])
    def test_a_pool_takes_what_its_arrays_take(self, config: ModelConfig, dtype: str, page_rows: int):
        config = dataclasses.replace(config, num_layers=3, num_heads=10, num_kv_heads=5, head_dim=7)
        shape = pool_shape(config, 2, page_rows)
        assert shape == (3, 2, 5, page_rows, 7)
        taken = sum(np.zeros(shape, jnp.dtype(dtype)).nbytes for _ in "kv")
        assert pool_bytes(config, dtype, 2, page_rows) == taken
        config = dataclasses.replace(config, kv_cache_dtype="fp8")
        arrays = jax.tree.leaves(empty_pool(config, 2, page_rows, dtype))
        assert {x.shape for x in arrays} == {shape, shape[:-1]}
        # A byte for each number, and two for each head of a row.
        assert pool_bytes(config, dtype, 2, page_rows) == sum(x.nbytes for x in arrays)
        assert pool_bytes(config, dtype, 2, page_rows) == 2 * 2 * 3 * 5 * page_rows * (7 + 2)


class TestErrors:
    @pytest.mark.parametrize(
        ("operation", "message"),
        [
            (
                lambda p, _: p.allocate(5, 7 * ROWS),
                "request 5 needs 7 pages .* 448 rows, and 6 of 9 are free",
            ),
            (lambda p, _: p.allocate(5, 9 * ROWS), "request 5 needs 9 pages .* and 6 of 9 are free: wait"),
            (lambda p, _: p.allocate(1, 1), "request 1 holds 2 pages .* already: release it first"),
            (lambda p, _: p.allocate(1, 99 * ROWS), "request 1 holds 2 pages .* already"),
            (
                lambda p, _: p.release(1, keep=[2]).allocate(5, 9 * ROWS, kept=[2]),
                "request 5 needs 8 pages of the KV pool beside 1 kept for 576 rows, and 7 of 9 are free",
            ),
            (
                lambda p, _: p.release(1, keep=[2, 3]).allocate(5, ROWS, kept=[2, 3]),
                "request 5 needs 1 pages of the KV pool for 64 rows, and 2 kept are given: .* at most",
            ),
            (lambda p, _: p.allocate(5, ROWS, kept=[2]), r"pages \[2\] of the KV pool are not kept"),
            (
                lambda p, _: p.release(1, keep=[2]).discard([3, 2, 0, -1, 10, 999]),
                r"pages \[-1, 0, 3, 10, 999\] of the KV pool are not kept",
            ),
            (lambda p, _: p.release(1, keep=[4, 2, 1]), r"request 1 does not hold pages \[1, 4\]"),
            (lambda p, _: p.release(5, keep=[1]), "request 5 is not in the KV pool"),
            (lambda p, _: p.release(5), "request 5 is not in the KV pool"),
            (lambda p, _: p.release(1).release(1), "request 1 is not in the KV pool"),
            (lambda p, _: p.pages_of(5), "request 5 is not in the KV pool: allocate"),
            (lambda p, _: p.page_table([0, 5], [1, 1], 9), "request 5 is not in the KV pool"),
            (
                lambda p, _: p.page_table([1], [129], 9),
                "request 1 holds 2 pages .* 128 rows, not 129: allocate pages for all",
            ),
            (
                lambda p, _: p.page_table([0, 1], [1, 65], 2),
                "3 pages .* do not fit 2 entries: .* larger bound",
            ),
            (lambda p, _: p.allocate(5, -1), "-1 rows of the KV pool: expected 0 or more"),
            (lambda p, _: p.page_table([1], [-1], 9), "-1 rows"),
            (
                lambda p, _: PageBook.empty(0, 64),
                "a KV pool of 0 pages: expected at least 1, the scratch page",
            ),
            (lambda p, _: PageBook.empty(2, 0), "pages of 0 rows: expected a positive multiple of 64"),
            (lambda p, _: PageBook.empty(2, -64), "pages of -64 rows"),
            (lambda p, config: pool_shape(config, 2, 96), "pages of 96 rows: expected a .* multiple of 64"),
        ],
    )
    def test_messages(self, config: ModelConfig, operation: Callable, message: str):
        pool = pool_with(ROWS, 2 * ROWS)
        owned = held(pool)
        with pytest.raises(KvPoolError, match=message) as raised:
            operation(pool, config)
        assert isinstance(raised.value, JdllmError)
        assert held(pool) == owned
        assert free(pool) == [4, 5, 6, 7, 8, 9]
