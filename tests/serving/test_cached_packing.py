"""Batches of cached dispatches: as few rows as can be, and what scoring is bounded by."""

from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.pool import PAGE_ROWS
from jdllm.models.selection import Scoring
from jdllm.serving.cached_packing import pack_refresh, pack_reuse
from jdllm.serving.kv_pool import KvPool
from jdllm.serving.request import Request, generation_request
from tests.benchmarks.shapes import small

PROMPT, GENERATED = 100, 64
CONFIG: ModelConfig = small("llada-8b")


def requests(*caches: str, **options: Any) -> tuple[list[Request], KvPool]:
    """A request for each cache, with its pages."""
    pool, out = KvPool.empty(64, PAGE_ROWS), []
    for index, cache in enumerate(caches):
        asked: dict[str, Any] = {"cache": cache, "refresh_delay": 0, **options}
        sampling = SamplingParams(gen_length=GENERATED, block_length=32, **asked)
        out.append(generation_request(index, np.full(PROMPT, 3), sampling, CONFIG))
        pool = pool.allocate(index, PROMPT + GENERATED)
    return out, pool


@pytest.mark.parametrize(("count", "rows"), [(1, 32), (2, 64), (3, 128)])
def test_a_reuse_has_the_rows_of_its_blocks(count: int, rows: int):
    asked, pool = requests(*["dual"] * count)
    pack_refresh(asked, CONFIG, pool)
    (batch, candidates), table = pack_reuse(asked, CONFIG, pool)
    assert len(batch.tokens) == rows
    assert len(table.first) == rows // 32 + 1
    assert [len(c) for c in candidates] == [32] * count
    for index, request in enumerate(asked):
        np.testing.assert_array_equal(request.forwarded, np.arange(PROMPT, PROMPT + 32))
        positions = np.asarray(batch.rows.positions)[32 * index : 32 * index + 32]
        np.testing.assert_array_equal(positions, request.forwarded)


@pytest.mark.parametrize(
    ("caches", "options", "expected"),
    [
        (["dual", "prefix"], {}, None),
        (["dual", "sparse"], {}, Scoring(block_rows=32)),
        (["head_sparse"], {"pool_kernel": 1001}, Scoring(block_rows=32)),
    ],
)
def test_what_scoring_is_bounded_by(caches: list[str], options: dict[str, int], expected: Scoring | None):
    asked, pool = requests(*caches, **options)
    assert pack_refresh(asked, CONFIG, pool).scoring == expected


@pytest.mark.parametrize("count", [1, 5])
def test_the_table_of_a_refresh_holds_all_that_its_rows_can_fill(count: int):
    asked, pool = requests(*["dual"] * count)
    packed, selection, table, _ = pack_refresh(asked, CONFIG, pool)
    rows, segments = len(packed.batch.tokens), len(selection.keep)
    assert len(table.pages) == rows // PAGE_ROWS + segments
    owned = np.diff(np.asarray(table.first))
    np.testing.assert_array_equal(owned[:count], -(-np.asarray(selection.keep)[:count] // PAGE_ROWS))
    assert not owned[count:].any()
