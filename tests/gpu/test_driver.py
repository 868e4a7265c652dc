"""The drivers of a real card: they mean the one that JAX computes on, and asking them takes nothing of it."""

import os
import subprocess
import sys

import jax
import pynvml
import pytest

from jdllm.planning.driver import card_state

pytestmark = pytest.mark.gpu

MIB = 2**20


def ask(code: str, **environment: str) -> str:
    """What a fresh process prints, which has not started CUDA."""
    command = [sys.executable, "-c", f"from jdllm.planning.driver import card_state\n{code}"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_card_is_the_one_that_jax_computes_on():
    for device in jax.devices():
        assert device.platform == "gpu", "this lane needs a card"
        state, stats = card_state(device.local_hardware_id), device.memory_stats()
        assert state is not None
        assert ".".join(map(str, state.capability)) == device.compute_capability
        assert state.used >= stats["pool_bytes"]
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
        assert stats["bytes_limit"] == pytest.approx(fraction * state.memory, rel=0.005)


def test_asking_makes_no_context():
    grown = ask("before = card_state(0).used\nprint(card_state(0).used - before)")
    assert int(grown) < 100 * MIB


def test_a_card_that_is_named_by_its_id():
    pynvml.nvmlInit()
    last = pynvml.nvmlDeviceGetHandleByIndex(pynvml.nvmlDeviceGetCount() - 1)
    unique, size = pynvml.nvmlDeviceGetUUID(last), pynvml.nvmlDeviceGetMemoryInfo(last)
    pynvml.nvmlShutdown()
    told = ask("print(card_state(0).memory, card_state(1))", CUDA_VISIBLE_DEVICES=unique[:12])
    memory, other = told.split()
    assert int(memory) == pytest.approx(size.total, rel=0.02)
    assert other == "None"
