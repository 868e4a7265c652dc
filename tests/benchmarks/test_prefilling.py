"""Questions over long contexts, by stage: each preset with the shape of its model, in a record of its own."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import prefilling
from benchmarks.shapes import SHAPES
from tests.benchmarks.shapes import small

STAGES = {"draft_ms", "score_ms", "retain_ms", "build_ms", "answer_step_ms"}


@pytest.mark.slow
def test_presets_are_measured_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for shape in ("dream-7b", "llada-8b"):
        monkeypatch.setitem(SHAPES, shape, dataclasses.replace(small(shape), bos_id=88))
    asked = ["--preset", "dream_sparse", "ultrallada", "--context", "2048", "--repeats", "1"]
    prefilling.main([*asked, "--max-num-batched-tokens", "4096", "--out", str(tmp_path)])
    rows = {}
    for name in ("prefilling_dream-7b_dream_sparse", "prefilling_llada-8b_ultrallada"):
        [rows[name]] = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert rows[name].keys() >= STAGES - {"draft_ms"}
        assert rows[name]["stored_chunks"] == 2
    sparse, ultra = rows.values()
    assert "draft_ms" in sparse
    assert sparse["retain_ms"] > 10 * ultra["retain_ms"]
    assert ("peak_gib" in sparse, "peak_gib" in ultra) == (True, False)
