"""Batches of cached dispatches: as few rows as can be."""

from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.planning.ladder import TILE_ROWS, Entry
from jdllm.serving.denoise.cached_packing import pack_refresh, pack_reuse
from jdllm.serving.pool.page_book import PageBook
from jdllm.serving.request import Request
from tests.benchmarks.shapes import small
from tests.engines import entry_of, generation_request

PROMPT, GENERATED = 100, 64
CONFIG: ModelConfig = small("llada-8b")


def requests(*caches: str, **options: Any) -> tuple[list[Request], PageBook]:
    """A request for each cache, with its pages."""
    pool, out = PageBook.empty(64, PAGE_ROWS), []
    for index, cache in enumerate(caches):
        asked: dict[str, Any] = {"cache": cache, "refresh_delay": 0, **options}
        sampling = SamplingParams(gen_length=GENERATED, block_length=32, **asked)
        out.append(generation_request(index, np.full(PROMPT, 3), sampling, CONFIG))
        pool = pool.allocate(index, PROMPT + GENERATED)
    return out, pool


def store_all(asked: list[Request], pool: PageBook) -> None:
    """A refresh of all, as the engine takes it in."""
    for request, stored in zip(asked, pack_refresh(asked, CONFIG, pool, entry_of(asked)).stored, strict=True):
        assert stored is not None
        request.store(*stored)


def test_packing_changes_no_request():
    asked, pool = requests("dual", "selective")
    pack_refresh(asked, CONFIG, pool, entry_of(asked))
    assert [(len(r.forwarded), r.stored) for r in asked] == [(PROMPT + GENERATED, 0)] * 2


@pytest.mark.parametrize(("count", "rows"), [(1, 32), (2, 64), (3, 128)])
def test_a_reuse_has_the_rows_of_its_blocks(count: int, rows: int):
    asked, pool = requests(*["dual"] * count)
    store_all(asked, pool)
    entry = Entry(rows, rows, 8, 64)
    (batch, candidates), table, _ = pack_reuse(asked, CONFIG, pool, entry, 100, TILE_ROWS)
    assert len(batch.tokens) == rows
    assert len(table.first) == rows // 32 + 1
    assert [len(c) for c in candidates] == [32] * count
    for index, request in enumerate(asked):
        np.testing.assert_array_equal(request.forwarded, np.arange(PROMPT, PROMPT + 32))
        positions = np.asarray(batch.rows.positions)[32 * index : 32 * index + 32]
        np.testing.assert_array_equal(positions, request.forwarded)


@pytest.mark.parametrize("count", [1, 5])
def test_the_table_of_a_refresh_holds_all_that_its_rows_can_fill(count: int):
    asked, pool = requests(*["dual"] * count)
    packed, selection, table, _ = pack_refresh(asked, CONFIG, pool, entry_of(asked))
    rows, segments = len(packed.batch.tokens), len(selection.keep)
    assert len(table.pages) == rows // PAGE_ROWS + segments
    owned = np.diff(np.asarray(table.first))
    np.testing.assert_array_equal(owned[:count], -(-np.asarray(selection.keep)[:count] // PAGE_ROWS))
    assert not owned[count:].any()
