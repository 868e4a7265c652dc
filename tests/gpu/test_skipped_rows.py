"""Kernels of which some warpgroups have no rows end, in a process of their own: one that hangs stays."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.gpu

SECONDS = 200
"""Several times as long as all launches take."""


def test_kernels_end_and_skipped_rows_change_no_others():
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "tests.skipped_rows"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [case["kernel"] for case in told] == ["head_rows", "products"]
    assert all(case["differing"] == 0 for case in told), told
