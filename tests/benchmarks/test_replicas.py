"""Requests of one router, shared out to replicas."""

import numpy as np
import pytest

from benchmarks.recorded_trace import Recorded
from benchmarks.replicas import ROUTINGS, row_of, shares
from benchmarks.simulation import Asked, Host
from jdllm.serving.demands import Kind

TIMES = {Kind.REFRESH: {128: 0.010}, Kind.REUSE: {32: 0.002, 64: 0.003}}
FOUND = Recorded([Asked(0.0, 4, 8, blocks=1)], np.zeros(1), TIMES, Host(), 4)
ALONE = 0.010 + 3 * 0.002


@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_replica_has_the_rate(routing: str):
    arrivals = shares(20, 2.0, 100, routing)
    assert sum(map(len, arrivals)) == 2000
    assert all(each == sorted(each) for each in arrivals)
    assert np.mean([each[-1] for each in arrivals]) == pytest.approx(50, rel=0.1)


def test_arrivals_in_turn_come_more_evenly():
    """Gaps of a Poisson process vary as much as they are long, and sums of 20 of them a 4.5th of that."""
    spread = {
        routing: np.concatenate([np.diff(each) for each in shares(20, 2.0, 100, routing)]).std()
        for routing in ROUTINGS
    }
    assert spread["random"] == pytest.approx(0.5, rel=0.1)
    assert spread["in turn"] == pytest.approx(0.5 / np.sqrt(20), rel=0.2)


def test_a_row_is_of_all_simulated_replicas():
    row = row_of(FOUND, replicas=4, rate=0.01, requests=5, routing="in turn", simulated=2)
    assert row["requests"] == 10
    assert row["latency_mean_s"] == pytest.approx(ALONE)  # nobody meets another one
    assert row["worst_replica_s"] == pytest.approx(ALONE)
