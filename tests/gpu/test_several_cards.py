"""Two cards generate what one generates, in a process of their own: the lane gives each process one card."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llada", "llama"])
def test_tokens_are_those_of_one_card(family: str):
    """In f32 sums in another order change the last bits of logits, and no token."""
    cards = os.environ.get("JDLLM_TEST_CARDS", "").split()
    if len(cards) < 2:
        pytest.skip("this machine has fewer than two cards")
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(cards[:2]), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.several_cards", family, "all", "1", "2"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone, shared = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert shared["tokens"] == alone["tokens"]
