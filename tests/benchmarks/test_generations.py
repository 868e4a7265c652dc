"""Whole generations on a small model, and the floor of ragged ones, counted by hand."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import nnx

from benchmarks.generations import (
    MOST_TIMED,
    generation,
    generation_flops,
    measure,
    measure_prompts,
    prompt_lengths,
)
from benchmarks.shapes import SHAPES
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from tests.benchmarks.shapes import small


@pytest.mark.slow
def test_a_row_counts_tokens_and_steps():
    llm = LLM(Transformer(small("llada-8b"), rngs=nnx.Rngs(0), dtype="float32"), progress=False)
    sampling = SamplingParams(gen_length=8, block_length=4, cache="dual", early_stop=False)
    row = measure(llm, 2, 5, sampling)
    assert row["steps"] == row["evaluated"] == 8
    assert row["compiled"] == 0
    assert row["tokens_s"] * row["seconds"] == pytest.approx(16)
    assert row["steps_ms"] * 8 == pytest.approx(1e3 * row["seconds"])


@pytest.mark.parametrize(("compiling", "timed"), [(1, 2), (3, 4), (9, 1 + MOST_TIMED)])
def test_a_run_that_compiled_is_not_timed_if_another_may_not(compiling: int, timed: int):
    """Runs, the first `compiling` of which compile, evaluate their number."""
    llm: Any = SimpleNamespace(
        config=small("llada-8b"),
        engine=SimpleNamespace(evaluated=0, settle=lambda: None),
        executables=SimpleNamespace(compiled=0, loaded=0),
    )
    runs: list[int] = []

    def generate(**_: Any) -> list[SimpleNamespace]:
        runs.append(len(runs) + 1)
        llm.engine.evaluated += runs[-1]
        made = "loaded" if runs[-1] % 2 else "compiled"
        setattr(llm.executables, made, getattr(llm.executables, made) + (runs[-1] <= compiling))
        time.sleep(1e-4)
        return [SimpleNamespace(nfe=8)]

    llm.generate = generate
    row = measure_prompts(llm, [5], SamplingParams(gen_length=8))
    assert row["evaluated"] == runs[-1] == timed
    assert row["compiled"] == (timed <= compiling)


def test_the_workload_is_that_of_the_published_comparison():
    lengths = prompt_lengths()
    assert (len(lengths), round(np.mean(lengths)), max(lengths)) == (32, 876, 1953)


@pytest.mark.parametrize(
    ("cache", "whole", "keys"), [("none", 32, 0), ("dual", 2, 1.0), ("head_sparse", 2, 0.5)]
)
def test_the_floor_of_one_request(cache, whole: int, keys: float):
    """Products of every row with the layers' matrices, of queries with keys and values, and of the head."""
    config, length, block = SHAPES["llada-8b"], 512 + 256, 32
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 12288)
    rows = whole * length + (32 - whole) * block
    pairs = whole * length**2 + (32 - whole) * block * (block + keys * (length - block))
    head = sum(range(1, 33)) * 4096 * 126464
    expected = 8 * 2 * (rows * layers + 2 * 32 * 4096 * pairs + head)
    sampling = generation(cache, 0.5, None if cache == "none" else 1)
    assert generation_flops(config, sampling, 512) == pytest.approx(expected)
