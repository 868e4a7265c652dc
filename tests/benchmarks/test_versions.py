"""Versions that take turns: each runs its own code."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import versions
from benchmarks.record import Sustained
from benchmarks.shapes import SHAPES
from tests.benchmarks.shapes import small

STEP = """
import time
from jdllm import SECONDS
STEPS, SHAPES = 2, {"small": "its own shape"}
def compile_step(params, config, *, fresh, cached):
    assert (config, fresh, cached) == ("its own shape", 8, 100) and "embed" in params
    def run():
        time.sleep(STEPS * SECONDS)
    return run
"""


@pytest.fixture
def checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two versions, whose steps take 2 and 4 ms."""
    monkeypatch.setitem(SHAPES, "small", small("dream-7b"))
    monkeypatch.setattr(versions, "sustained", lambda run: Sustained(0.5, {"sm_mhz": 1800.0, "watts": 600.0}))
    directories = []
    for name, seconds in (("old", 0.002), ("new", 0.004)):
        directory = tmp_path / name
        (directory / "jdllm").mkdir(parents=True)
        (directory / "jdllm" / "__init__.py").write_text(f"SECONDS = {seconds}")
        (directory / "benchmarks").mkdir()
        (directory / "benchmarks" / "cached_step.py").write_text(STEP)
        directories.append(directory)
    return directories


def test_each_version_runs_its_own_code_and_leaves_ours_as_it_was(checkouts: list[Path]):
    modules, path = dict(sys.modules), list(sys.path)
    old, new = versions.measure(checkouts, "small", 8, 100)
    assert 2 <= old["least_ms"] <= old["step_ms"] <= old["most_ms"]
    assert new["least_ms"] >= 4
    assert old["least_ms"] < 4
    assert (old["sustained_ms"], old["watts"], old["joules"]) == (250, 600, 150)
    assert all(sys.modules[name] is module for name, module in modules.items())
    assert not any(str(checkouts[0].parent) in str(module) for module in sys.modules.values())
    assert sys.path == path


OPERATOR = """
import argparse, json, pathlib
from jdllm import SECONDS
def main(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args(arguments)
    (args.out / "its.json").write_text(json.dumps({"rows": [{"rows": args.rows, "ms": 1e3 * SECONDS}]}))
"""


def test_an_operator_of_each_version(checkouts: list[Path], tmp_path: Path):
    for directory in checkouts:
        (directory / "benchmarks" / "operators").mkdir()
        (directory / "benchmarks" / "operators" / "masked_logits.py").write_text(OPERATOR)
    command = [*map(str, checkouts), "--out", str(tmp_path), "--operator", "masked_logits", "--rows", "256"]
    versions.main(command)
    rows = json.loads((tmp_path / "versions_masked_logits.json").read_text())["rows"]
    old, new = ({"version": str(d), "rows": 256, "ms": ms} for d, ms in zip(checkouts, (2, 4), strict=True))
    assert rows == [{"turn": turn, **row} for turn in range(2) for row in (old, new)]


def test_no_operator(checkouts: list[Path], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        versions.main([str(checkouts[0]), "--operator", "--rows", "256"])
    assert "there is no operator '--rows': expected one of masked_logits, " in capsys.readouterr().err


def test_turns_alternate():
    called = []
    times = versions.by_turns([lambda: called.append(0), lambda: called.append(1)], rounds=3)
    assert called == [0, 0, 0, 0, 1, 1, 1, 1] * 3
    assert [len(own) for own in times] == [3, 3]


def test_a_directory_that_is_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        versions.main([str(tmp_path)])
    assert "is no checkout of this repository: it has no benchmarks and no jdllm" in capsys.readouterr().err
