"""What one process serialised, another one loads: both compute the same."""

import argparse
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import compile as benchmark
from benchmarks.shapes import SHAPES
from jdllm.compiling.executable import Program, from_bytes
from jdllm.layers import rms_norm
from jdllm.serving.engine import Engine
from tests.benchmarks.shapes import small

pytestmark = pytest.mark.usefixtures("no_compilation_cache")


@pytest.fixture
def case() -> benchmark.Case:
    x = np.linspace(1, 2, 3 * 11, dtype=np.float32).reshape(3, 11)
    return benchmark.Case("norm", Program(rms_norm, (x, np.ones(11, np.float32)), {"eps": 0.0}))


def test_what_is_loaded_computes_what_was_compiled(case: benchmark.Case, tmp_path: Path):
    first = benchmark.compile_and_keep(case, tmp_path)
    second = benchmark.load_and_call(case, tmp_path)
    assert set(first) - set(second) == {"lower_s", "compile_s", "serialise_s", "mib"}
    assert set(second) == {"program", "process", "load_s", "first_call_s", "second_call_s"}
    content = (tmp_path / case.name).read_bytes()
    x, _ = case.program.args
    actual = from_bytes(content, case.program, jax.devices()[:1])(*case.program.args)
    np.testing.assert_allclose(actual, x / np.sqrt((x**2).mean(axis=1, keepdims=True)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ladder", [False, True])
def test_steps_and_ladders(ladder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    programs = Engine.programs
    monkeypatch.setattr(Engine, "programs", lambda engine: programs(engine)[:2])
    monkeypatch.setattr(Engine, "warm", lambda _: None)
    monkeypatch.setitem(SHAPES, "small", small("llada-8b"))
    args = argparse.Namespace(
        shape="small", ladder=ladder, rows=16, fresh=8, cached=64, max_num_batched_tokens=140
    )
    first, second = (list(benchmark.rows_of(args, tmp_path, loads=loads)) for loads in (False, True))
    if not ladder:
        assert (
            [row["program"] for row in first] == [row["program"] for row in second] == ["step_16", "chain_8"]
        )
        return
    # Two of the engine's, and two that score texts.
    assert first[0]["warmup_compiled"] == second[0]["warmup_loaded"] == 4
    assert first[0]["warmup_loaded"] == second[0]["warmup_compiled"] == 0
