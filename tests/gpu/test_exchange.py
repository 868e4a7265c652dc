"""Sums over cards by kernels, in processes of their own: the lane gives each process one card."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import chained_cards
from tests.exchanged_sums import CASES
from tests.helpers import ROOT

pytestmark = pytest.mark.gpu

SECONDS = 300
"""A kernel that waits in vain gives up long before."""


def told_by(module: str) -> list[dict[str, Any]]:
    """What a program tells about each case, on all cards of this machine; skips the test where it has one."""
    cards = os.environ.get("JDLLM_TEST_CARDS", "").split()
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards else {}
    # The process that waits holds memory of these cards too.
    env = os.environ | visible | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if told and told[0]["cards"] < 2:
        pytest.skip("this machine has fewer than two cards")
    assert done.returncode == 0, done.stderr
    return told[1:]


def test_every_card_has_the_sum_in_f32_rounded_once_and_the_rows_of_all():
    """Also after sums of NaN in all of the memory, and for sums of other sizes one after the other."""
    told = told_by("tests.exchanged_sums")
    assert len(told) >= 2 * len(CASES)
    for case in told:
        assert (case["poisoned"], case["differing"]) == (True, 0), case


def test_a_chain_waits_for_what_other_cards_add():
    """The same bits every time and on every card, those of kernels that do not overlap."""
    told = told_by("tests.chained_cards")
    assert len(told) >= len(chained_cards.CASES)
    for case in told:
        assert case["differing"] == 0, case
        assert case["far"] < 0.03, case
