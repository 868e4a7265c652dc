"""Estimated times of steps, against steps that were measured and against arithmetic."""

import dataclasses

import pytest

from benchmarks.shapes import SHAPES
from jdllm.execution.offload.tiers import HostTiers
from jdllm.planning.budget import Budget
from jdllm.planning.descriptions import described_targets
from jdllm.planning.plan import Workload, plan_memory
from jdllm.planning.step_time import RATES, format_seconds, step_time

GIB = 2**30
LLADA = Workload(SHAPES["llada-8b"])


def estimate(context: int, target: str = "h200", workload: Workload = LLADA, gib: int = 100):
    return step_time(workload, plan_memory(workload, context, Budget(gib * GIB)), target)


@pytest.mark.parametrize(
    ("context", "measured", "error"), [(4096, 0.104, 0.05), (16384, 0.584, 0.05), (400_000, 158.0, 0.15)]
)
def test_what_an_h200_took(context: int, measured: float, error: float):
    assert estimate(context).seconds == pytest.approx(measured, rel=error)


def test_other_cards_are_said_to_be_at_data_sheet_rate():
    ours, a100, l40s = (estimate(16384, target) for target in ("h200", "a100-80gb", "l40s"))
    assert a100.seconds / ours.seconds == pytest.approx(650 / 312)
    assert l40s.seconds / ours.seconds == pytest.approx(650 / 362)
    assert str(ours).endswith(" ms (estimate at the measured rate, 650 TFLOP/s)")
    assert str(ours).startswith("about ")
    assert str(a100).endswith(" s (estimate at the data-sheet rate, 312 TFLOP/s)")
    assert str(a100).startswith("at least ")
    full = estimate(16384, workload=dataclasses.replace(LLADA, dtype="float32"))
    assert full.seconds / ours.seconds == pytest.approx(650 / 67)
    assert not full.measured


def test_every_described_card_has_rates():
    assert sorted(RATES) == described_targets()
    assert [target for target, rates in RATES.items() if rates.measured] == ["h200"]


def test_no_step_is_faster_than_reading_the_weights():
    weights = 2 * 8.02e9
    assert estimate(1).seconds == pytest.approx(weights / RATES["h200"].bytes, rel=0.01)


def test_no_step_is_faster_than_its_transfers():
    """One row of queries against all keys and values, which pass through the device chunk after chunk."""
    tiers = HostTiers(chunk_rows=128, kv=True)
    plan = plan_memory(LLADA, 32768, Budget(16 * GIB), host_tiers=[tiers])
    assert plan.tiers == tiers
    keys_and_values = 32 * (32768 // 128) * 2 * 32768 * 4096 * 2
    assert step_time(LLADA, plan, "h200").seconds == pytest.approx(keys_and_values / 51e9, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0037, "3.7 ms"), (0.104, "104 ms"), (16.84, "16.8 s"), (158, "2.6 min"), (7200, "2.0 h")],
)
def test_times_in_words(seconds: float, text: str):
    assert format_seconds(seconds) == text
