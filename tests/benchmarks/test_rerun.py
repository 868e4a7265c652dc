"""Records measured again: what runs, what is compared with what, and what is said to have moved."""

import json
from pathlib import Path

import pytest

from benchmarks import record, rerun
from benchmarks.record import RESULTS
from benchmarks.rerun import QUOTED, compare, main

NAME = "load"
FAKE = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
print("W0000 some autotuning warning")
rows = [{{"shape": "a", "gb_per_s": {0}}}, {{"shape": "b", "gb_per_s": 2.0, "evaluated": 7}}]
record = {{"command": "python3 -m benchmarks.fake", "rows": rows}}
(parser.parse_args().out / "load.json").write_text(json.dumps(record))
"""


def checkout(directory: Path, figure: float) -> Path:
    (directory / "benchmarks" / "results").mkdir(parents=True)
    (directory / "benchmarks" / "fake.py").write_text(FAKE.format(figure))
    return directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose record is 10.0 and which reaches 8.0 now."""
    directory = checkout(tmp_path / "here", 8.0)
    results = directory / "benchmarks" / "results"
    rows = [{"shape": "a", "gb_per_s": 10.0}, {"shape": "b", "gb_per_s": 2.05}]
    (results / "load.json").write_text(json.dumps({"command": "python3 -m benchmarks.fake", "rows": rows}))
    monkeypatch.setattr(rerun, "RESULTS", results)
    monkeypatch.setattr(rerun, "__file__", str(directory / "benchmarks" / "rerun.py"))
    return directory


def test_what_moved_is_named_and_counted(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = checkout(tmp_path / "other", 7.9)
    assert main([NAME, "--against", str(other)]) == 1
    out = capsys.readouterr().out
    assert "load: shape=a: 8, record 10 (0.800x), against 7.9 (1.013x)  MOVED against record\n" in out
    assert "load: shape=b: 2, record 2.05 (0.976x), against 2 (1.000x)\n" in out
    assert "autotuning" not in out
    assert json.loads((here / "benchmarks/results/load.json").read_text())["rows"][0]["gb_per_s"] == 10.0


def test_records_are_replaced_on_request(here: Path):
    main([NAME, "--record"])
    assert json.loads((here / "benchmarks/results/load.json").read_text())["rows"][0]["gb_per_s"] == 8.0


def test_a_benchmark_that_fails_is_no_figure(here: Path):
    (here / "benchmarks" / "fake.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"benchmarks.fake.*ended with 3"):
        main([NAME])


@pytest.mark.parametrize(("arguments", "words"), [(["nothing"], "nothing"), (["--against", "."], "checkout")])
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    arguments = [str(tmp_path) if a == "." else a for a in arguments]
    with pytest.raises(SystemExit):
        main(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", QUOTED)
def test_every_quoted_record_compares_with_itself_row_by_row(name: str):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    figures = compare(name, rows, rows, rows)
    assert len({figure.case for figure in figures}) == len(rows)
    assert not any(figure.moved for figure in figures)


def test_records_name_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("JDLLM_COMMIT", "abc")
    assert record.environment()["commit"] == "abc"
    (tmp_path / "bin").mkdir()
    git = tmp_path / "bin" / "git"
    git.write_text("#!/bin/sh\necho 0123-dirty\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(git.parent))
    assert record.environment()["commit"] == "0123-dirty"
