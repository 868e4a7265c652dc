"""Requests with a cache, in the KV pool and beyond, are measured as an LLM runs them."""

import dataclasses
from collections.abc import Iterator

import pytest

from benchmarks import cached_long
from benchmarks.shapes import SHAPES
from jdllm.planning.templates import step_template


@pytest.fixture(autouse=True)
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("jdllm.planning.templates.WORKSPACE", 0)
    step_template.cache_clear()
    yield
    step_template.cache_clear()


@pytest.mark.slow
def test_a_row_has_refreshes_and_reuses(monkeypatch: pytest.MonkeyPatch):
    small = dataclasses.replace(
        SHAPES["dream-7b"],
        num_layers=16,
        hidden_size=128,
        intermediate_size=256,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=512,
        mask_id=500,
    )
    monkeypatch.setitem(cached_long.SHAPES, "dream-7b", small)
    held = cached_long.case("dream-7b", "256@60MiB:head_sparse", "1GiB", 4)
    assert (held["evaluations"], held["layered"]) == (4, 0)
    assert held["planned_gib"] < 60 / 1024
    with pytest.raises(SystemExit, match="16384 tokens have no room in 60MiB with cache sparse"):
        cached_long.case("dream-7b", "16384@60MiB:sparse", "1GiB", 4)
    row = cached_long.case("dream-7b", "2048@60MiB", "1GiB", 4)
    assert row["evaluations"] == 4
    assert row["layered"] == 4
    assert row["reuse_s"] > 0
    assert row["planned_gib"] < 60 / 1024
