"""Admission: first come, first served, within the budget of packed rows."""

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdllm.decoding.batch import Batch
from jdllm.decoding.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request, generation_request
from jdllm.serving.runner import StepRunner


def make(config: ModelConfig, lengths: list[int], **options) -> list[Request]:
    """Requests with prompts of the given lengths that generate four tokens."""
    sampling = SamplingParams(gen_length=4, early_stop=False, **options)
    return [generation_request(i, np.arange(n), sampling, config) for i, n in enumerate(lengths)]


class Recorder(Executables):
    """Executables that note the batch of every call."""

    def __init__(self, executables: Executables):
        self._executables = executables
        self.batches: list[Batch] = []

    def call(self, function, *args: Any, **static) -> Any:
        self.batches.append(args[1])
        return self._executables.call(function, *args, **static)


@pytest.fixture(scope="module")
def engine_of(params: Params, config: ModelConfig, executables: Executables):
    def build(budget: int, compiled: Executables = executables) -> Engine:
        return Engine(StepRunner(params, config, compiled), config, budget)

    return build


@pytest.fixture
def waves_of(engine_of, executables: Executables):
    """Runs requests one step a dispatch; gives the requests of every packed step, and its rows in use."""

    def waves(requests: list[Request], budget: int) -> list[tuple[list[int], int]]:
        recorder = Recorder(executables)
        updates = engine_of(budget, recorder).run(requests, every_step=True)
        order = iter([update.request for update in updates])
        out = []
        for batch in recorder.batches:
            active = int((batch.segments.steps_left > 0).sum())
            rows = int((batch.rows.k_start < batch.rows.k_end).sum())
            out.append(([next(order) for _ in range(active)], rows))
        assert next(order, None) is None
        return out

    return waves


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=7),
    st.lists(st.sampled_from([1, 2, 4]), min_size=7, max_size=7),
    st.integers(1, 120),
)
def test_admission(waves_of, config: ModelConfig, lengths: list[int], steps: list[int], budget: int):
    requests = [make(config, [n] * (i + 1), steps=steps[i])[i] for i, n in enumerate(lengths)]
    left = {i: steps[i] for i in range(len(lengths))}
    admitted: list[int] = []
    for wave, rows in waves_of(requests, budget):
        waiting = [i for i in left if i not in admitted]
        running = [i for i in admitted if left[i]]
        while waiting and (not running or sum(lengths[i] + 4 for i in (*running, waiting[0])) <= budget):
            running.append(waiting.pop(0))
        assert wave == running
        admitted += [i for i in running if i not in admitted]
        for i in running:
            left[i] -= 1
        assert rows == sum(lengths[i] + 4 for i in wave)
        assert rows <= budget or len(wave) == 1
    assert not any(left.values())


def test_a_request_beyond_the_budget_runs_alone_and_in_its_turn(waves_of, config: ModelConfig):
    waves = waves_of(make(config, [10, 90, 10], steps=2), 40)
    assert [wave for wave, _ in groupby(waves)] == [([0], 14), ([1], 94), ([2], 14)]


def test_guidance_counts_twice(waves_of, config: ModelConfig):
    waves = waves_of(make(config, [12, 12, 12], steps=2, cfg_scale=1.0), 64)
    assert [wave for wave, _ in groupby(waves)] == [([0, 1], 64), ([2], 32)]


def test_requests_hold_their_results_and_times(engine_of, config: ModelConfig):
    requests = make(config, [3, 60, 60])
    list(engine_of(64).run(requests))
    for request in requests:
        assert request.finished
        assert request.steps == 4
        assert not (request.tokens == request.mask_id).any()
        times = request.timings()
        assert times.queued >= 0
        assert times.running > 0
        assert times.total == times.queued + times.running
    assert requests[1].timings().queued > requests[0].timings().queued


def test_updates_of_a_whole_block_come_step_by_step(engine_of, config: ModelConfig):
    runs = [
        list(engine_of(128).run(make(config, [5, 9], block_length=2), every_step=every))
        for every in (False, True)
    ]
    assert [(u.request, u.step) for u in runs[0]] == [(r, s) for s in range(4) for r in (0, 1)]
    for whole, single in zip(*runs, strict=True):
        assert whole[:2] == single[:2]
        for a, b in zip(whole[2:], single[2:], strict=True):
            np.testing.assert_array_equal(a, b)


def test_nothing_to_do(engine_of):
    assert list(engine_of(64).run([])) == []
