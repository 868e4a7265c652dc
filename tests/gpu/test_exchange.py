"""Sums over cards by the kernel, in a process of their own: the lane gives each process one card."""

import json
import os
import subprocess
import sys

import pytest

from tests.exchanged_sums import CASES
from tests.helpers import ROOT

pytestmark = pytest.mark.gpu

SECONDS = 300
"""A kernel that waits in vain gives up long before."""


def test_every_card_has_the_sum_in_f32_rounded_once():
    """Also after sums of NaN in all of the memory, and for sums of other sizes one after the other."""
    cards = os.environ.get("JDLLM_TEST_CARDS", "").split()
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards else {}
    # The process that waits holds memory of these cards too.
    env = os.environ | visible | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "tests.exchanged_sums"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if told and told[0]["cards"] < 2:
        pytest.skip("this machine has fewer than two cards")
    assert done.returncode == 0, done.stderr
    assert len(told) > len(CASES)
    for case in told[1:]:
        assert (case["poisoned"], case["differing"]) == (True, 0), case
