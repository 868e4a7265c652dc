"""Generations of block models, as the benchmark measures them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import blocks
from benchmarks.record import Ceilings
from benchmarks.shapes import BLOCK_SHAPES
from jdllm.models.config import ModelConfig, MoeConfig

Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def rows_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Rows for small models of a published shape."""

    def rows(shape: str, *options: str) -> list[dict[str, Any]]:
        monkeypatch.setitem(BLOCK_SHAPES, shape, small(BLOCK_SHAPES[shape]))
        monkeypatch.setattr(blocks, "measure_ceilings", lambda: Ceilings(flops=1e12, bytes=1e11))
        monkeypatch.setattr(blocks, "GEN_LENGTH", 32)
        asked = ["--shape", shape, "--batch", "2", "--prompt", "16", "--block", "8", "--per-forward", "2"]
        blocks.main([*asked, *options, "--out", str(tmp_path)])
        [written] = tmp_path.iterdir()
        return json.loads(written.read_text())["rows"]

    return rows


def small(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        config,
        vocab_size=96,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_positions=32,  # fewer than a generation needs
        mask_id=90,
        eos_id=89,
        moe=config.moe and dataclasses.replace(MoeConfig(4, 2, 16), dense_layers=(0,)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", BLOCK_SHAPES)
def test_every_evaluation_counts(shape: str, rows_of: Rows):
    """Blocks of 8, two tokens a forward: 4 forwards fill each of 4 blocks. The first of them stores what is
    before the block, which is a prompt below a page, or the block before. Where logits are shifted, an
    evaluation of its own does."""
    config, [row] = BLOCK_SHAPES[shape], rows_of(shape)
    assert row["evaluated"] == 4 * 4 + (4 if config.logits_shift else 0)
    assert row["tokens_s"] * row["seconds"] == pytest.approx(2 * 32)
    assert row["forward_ms"] * row["evaluated"] == pytest.approx(1e3 * row["seconds"])
    assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["forward_ms"])


@pytest.mark.slow
def test_ways_to_generate(rows_of: Rows):
    """One token after another takes a step each, and the prompt is stored before. Two evaluations verify a
    draft of at least one token."""
    ways = ["fill", "one_by_one", "draft", "draft_lossy"]
    rows = rows_of("sdar-8b", "--way", *ways)
    assert [row["way"] for row in rows] == ways
    filled, one_by_one, *drafts = [row["evaluated"] for row in rows]
    assert (filled, one_by_one) == (16, 1 + 32)
    assert all(2 * 4 <= evaluated <= 2 * 32 for evaluated in drafts)


@pytest.mark.slow
def test_prompts_that_are_not_stored(rows_of: Rows):
    """A row of a layer meets 4 matrices of attention and 3 others, and sees the rest of its block of 8 and
    what is before. The benchmark fails where a prompt is stored already."""
    rows = rows_of("sdar-8b", "--prefill", "192", "100", "--max-num-batched-tokens", "128")
    assert [row["prompt"] for row in rows] == [100, 192]
    for row in rows:
        length = row["prompt"]
        matrices = length * 32 * (32 + 2 * 16 + 32 + 3 * 48)
        pairs = length * (length + 8) / 2
        assert row["floor_s"] * 1e12 == pytest.approx(2 * 2 * (matrices + 2 * 32 * pairs))
        assert (row["batched_tokens"], row["compiled"]) == (128, 0)
        assert row["share_of_floor"] == pytest.approx(row["floor_s"] / row["seconds"])
        assert row["tokens_s"] * row["seconds"] == pytest.approx(length)


def test_the_bytes_of_stored_rows():
    """36 layers of 8 heads of 128 numbers of 2 bytes, keys and values."""
    assert blocks.stored_bytes(BLOCK_SHAPES["sdar-8b"], 1000) == 36 * 8 * 128 * 2 * 2 * 1000
