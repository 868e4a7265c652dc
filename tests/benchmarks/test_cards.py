"""Steps on one card and on several, as the benchmark measures both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

_MEASURED = """
import dataclasses, sys
from benchmarks import record
from benchmarks.shapes import SHAPES
from benchmarks.steps import cards
from tests.benchmarks.shapes import small

SHAPES["llada-8b"] = dataclasses.replace(small("llada-8b"), intermediate_size=64)
cards.measure_ceilings = lambda: record.Ceilings(flops=1e12, bytes=1e11)
options = ["--devices", "1", "2", "--rows", "64", "--fresh", "8", "--cached", "100"]
cards.main([*options, "--out", sys.argv[1]])
"""


@pytest.mark.slow
def test_both_steps_are_measured_on_each_number_of_cards(tmp_path: Path):
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", _MEASURED, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "cards_llada-8b.json").read_text())["rows"]
    measured = [(row["step"], row["devices"]) for row in table]
    assert measured == [("cached", 1), ("cached", 2), ("full", 1), ("full", 2)]
    for alone, shared in (table[:2], table[2:]):
        assert alone["times"] == 1
        assert shared["times"] == alone["step_ms"] / shared["step_ms"]
        assert shared["floor_ms"] == alone["floor_ms"] / 2
