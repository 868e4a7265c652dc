"""Sums over cards, as the benchmark measures them, with the portable form in place of the kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.operators import exchange
from tests.helpers import ROOT

_MEASURED = """
import sys
from benchmarks.operators import exchange
from tests.benchmarks.test_exchange import some_addresses

exchange.addresses_of, exchange.FORMS["kernel"] = some_addresses, exchange.by_collective
if sys.argv[2:]:
    exchange.FORMS["psum"] = exchange.alone
exchange.REPEATS, exchange.TURNS = 1, 8
exchange.main(["--rows", "8", "16", "--columns", "64", "--out", sys.argv[1]])
"""


def some_addresses(mesh: Mesh) -> jax.Array:
    at = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    return jax.device_put(np.zeros((mesh.size, 6), np.int32), at)


def on_two(*command: str) -> subprocess.CompletedProcess[str]:
    """A run of Python in a process that has two devices."""
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_both_forms_are_measured_for_each_number_of_rows(tmp_path: Path):
    done = on_two("-c", _MEASURED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "exchange.json").read_text())
    assert (written["columns"], written["turns"]) == (64, 8)
    assert [(row["devices"], row["rows"]) for row in written["rows"]] == [(2, 8), (2, 16)]
    for row in written["rows"]:
        assert row["times"] == row["psum_us"] / row["kernel_us"]
        assert row["none_us"] > 0


@pytest.mark.slow
def test_a_wrong_sum_ends_the_run(tmp_path: Path):
    done = on_two("-c", _MEASURED, str(tmp_path), "wrong")
    assert done.returncode == 1
    assert "psum: a sum on" in done.stderr
    assert not (tmp_path / "exchange.json").exists()


@pytest.mark.slow
def test_devices_that_cannot_exchange_are_named():
    done = on_two("-m", "benchmarks", "exchange")
    assert done.returncode == 1
    assert "2 of these devices cannot exchange" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("devices", ["1", "4096"])
def test_too_few_devices_are_refused(devices: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        exchange.main(["--devices", devices])
    assert ended.value.code == 2
    assert f"--devices is {devices}: sums need two devices" in capsys.readouterr().err
