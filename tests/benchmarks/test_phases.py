"""One phase at a time: by hand, and from a trace of an engine."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.phases import InPhase, main
from benchmarks.simulation import Asked, Host, simulate
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.demands import Kind
from jdllm.serving.trace import Trace
from tests.engines import engine_of, finish, generation_request

TIMES = {Kind.REFRESH: {128: 0.010}, Kind.REUSE: {32: 0.002, 64: 0.003}}
LONG = Asked(0.0, 4, 12, blocks=2)  # of 4 steps each


def test_who_comes_in_a_refresh_joins_the_phase():
    # 10 ms refresh the first, 10 the second, and both reuse for 3 x 3; then the first has its second block.
    found = simulate([LONG, Asked(0.004, 4, 8, blocks=1)], TIMES, Host(), scheduler=InPhase)
    assert found.latency == pytest.approx([0.010 + 0.010 + 0.009 + 0.016, 0.029 - 0.004])
    assert (found.evaluated, found.served) == (1 + 1 + 3 + 1 + 3, 1 + 1 + 6 + 1 + 3)


def test_who_comes_while_others_reuse_waits_for_their_block():
    asked = [LONG, Asked(0.011, 4, 8, blocks=1)]
    found = simulate(asked, TIMES, Host(), scheduler=InPhase)
    # The first block takes 16 ms. Then both refresh, one behind the other, and reuse together.
    assert found.latency == pytest.approx([0.016 + 0.020 + 0.009, 0.045 - 0.011])
    assert (found.evaluated, found.served) == (4 + 2 + 3, 4 + 2 + 6)
    ours = simulate(asked, TIMES, Host())
    assert ours.latency[1] < found.latency[1]
    assert ours.evaluated > found.evaluated


def test_requests_in_step_take_the_same_either_way():
    asked = [LONG] * 3
    assert simulate(asked, TIMES, Host(), scheduler=InPhase).latency.tolist() == (
        simulate(asked, TIMES, Host()).latency.tolist()
    )


def test_a_trace_gives_a_row_for_each_scheduler_and_rate(
    params: Params, config: ModelConfig, executables: Executables, tmp_path: Path
):
    engine = engine_of(params, config, executables, 128)
    engine.trace = Trace(tmp_path / "trace.json")
    sampling = SamplingParams(gen_length=8, block_length=4, early_stop=False, cache="dual")
    prompts = [np.arange(1, n + 1) for n in (5, 9, 7)]
    finish(engine, [generation_request(i, p, sampling, config) for i, p in enumerate(prompts)])
    engine.close()
    main([str(tmp_path / "trace.json"), "--rate", "2", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "serving_phases.json").read_text())["rows"]
    assert [(row["arrivals"], row["scheduler"]) for row in rows] == [
        ("as recorded", "phases side by side"),
        ("as recorded", "one phase at a time"),
        ("2 a second", "phases side by side"),
        ("2 a second", "one phase at a time"),
    ]
    assert all(row["requests"] == 3 and row["latency_mean_s"] > 0 for row in rows)
