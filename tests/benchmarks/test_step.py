"""How the step's benchmark puts ours and the peers side by side."""

import json
from pathlib import Path

import pytest

from benchmarks.record import Ceilings
from benchmarks.shapes import SHAPES
from benchmarks.steps import full
from benchmarks.steps.full import parse_rows, with_ratios
from tests.benchmarks.shapes import small


def test_rows_of_a_peer_are_the_json_lines_and_all_lines_are_shown(capsys: pytest.CaptureFixture[str]):
    lines = ['{"rows": 8, "step_ms": 2.5}\n', "torch-eager: no row for llada-8b: out of memory\n"]
    assert list(parse_rows(lines)) == [{"rows": 8, "step_ms": 2.5}]
    assert capsys.readouterr().out == "".join(lines)


def test_ratio_is_the_time_of_a_peer_over_ours_at_the_same_rows():
    def row(system: str, rows: int, ms: float) -> dict[str, object]:
        return {"system": system, "rows": rows, "step_ms": ms}

    ours = [row("jdllm", 8, 2.0), row("jdllm", 16, 4.0)]
    table = with_ratios([*ours, row("jax", 8, 3.0), row("jax", 16, 2.0), row("torch-eager", 16, 8.0)])
    assert [(r["system"], r["rows"], r.get("ratio")) for r in table] == [
        ("jdllm", 8, None),
        ("jax", 8, 1.5),
        ("jdllm", 16, None),
        ("jax", 16, 0.5),
        ("torch-eager", 16, 2.0),
    ]


@pytest.mark.slow
def test_kernels_and_types_have_records_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SHAPES, "small", small("llada-8b"))
    monkeypatch.setattr(full, "measure_ceilings", lambda: Ceilings(1e12, 1e11))
    options = ["--shape", "small", "--rows", "16", "--dtype", "float32", "--kernels", "auto", "xla"]
    full.main([*options, "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert path.name == "step_small_auto-xla_float32.json"
    assert [row["attention"] for row in json.loads(path.read_text())["rows"]] == ["xla", "xla"]
    with pytest.raises(SystemExit):
        full.main([*options, "--peers"])


@pytest.mark.slow
def test_quantised_weights_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SHAPES, "small", small("llada-8b"))
    monkeypatch.setattr(full, "measure_ceilings", lambda: Ceilings(1e12, 1e11))
    full.main(["--shape", "small", "--rows", "16", "--quantization", "none", "fp8", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "step_small_none-fp8.json").read_text())["rows"]
    assert [row.get("quantization") for row in rows] == [None, "fp8"]


@pytest.mark.slow
def test_other_shares_of_masked_rows_have_a_record_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(SHAPES, "small", small("llada-8b"))
    monkeypatch.setattr(full, "measure_ceilings", lambda: Ceilings(1e12, 1e11))
    options = ["--shape", "small", "--rows", "20", "--mask-ratio", "0.1", "0.9"]
    full.main([*options, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "step_small_masked0.1-0.9.json").read_text())["rows"]
    assert [row["masked"] for row in rows] == [2, 18]
    assert rows[0]["floor_ms"] <= rows[1]["floor_ms"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mask-ratio", "0.1", "--peers"], "peers have half of the rows masked"),
        (["--mask-ratio", "0"], "expected numbers that mask some rows and leave some"),
        (["--mask-ratio", "1"], "expected numbers that mask some rows and leave some"),
    ],
)
def test_shares_that_cannot_be(options: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        full.main(options)
    assert words in capsys.readouterr().err
