"""Generations of block models, as the benchmark measures them."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import blocks
from benchmarks.record import Ceilings
from benchmarks.shapes import BLOCK_SHAPES
from jdllm.models.config import MoeConfig


@pytest.mark.slow
@pytest.mark.parametrize("shape", BLOCK_SHAPES)
def test_every_evaluation_counts(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Blocks of 8, two tokens a forward: 4 forwards fill each of 4 blocks. The first of them stores what is
    before the block, which is a prompt below a page, or the block before. Where logits are shifted, an
    evaluation of its own does."""
    config = BLOCK_SHAPES[shape]
    small = dataclasses.replace(
        config,
        vocab_size=96,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        mask_id=90,
        eos_id=89,
        moe=config.moe and dataclasses.replace(MoeConfig(4, 2, 16), dense_layers=(0,)),
    )
    monkeypatch.setitem(BLOCK_SHAPES, shape, small)
    monkeypatch.setattr(blocks, "measure_ceilings", lambda: Ceilings(flops=1e12, bytes=1e11))
    monkeypatch.setattr(blocks, "GEN_LENGTH", 32)
    options = ["--batch", "2", "--prompt", "16", "--block", "8", "--per-forward", "2"]
    blocks.main(["--shape", shape, *options, "--out", str(tmp_path)])
    [row] = json.loads((tmp_path / f"blocks_{shape}.json").read_text())["rows"]
    assert row["evaluated"] == 4 * 4 + (4 if config.logits_shift else 0)
    assert row["tokens_s"] * row["seconds"] == pytest.approx(2 * 32)
    assert row["forward_ms"] * row["evaluated"] == pytest.approx(1e3 * row["seconds"])
    assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["forward_ms"])


def test_the_bytes_of_stored_rows():
    """36 layers of 8 heads of 128 numbers of 2 bytes, keys and values."""
    assert blocks.stored_bytes(BLOCK_SHAPES["sdar-8b"], 1000) == 36 * 8 * 128 * 2 * 2 * 1000
