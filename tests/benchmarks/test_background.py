"""A request is measured step by step, while something is compiled and afterwards."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.background import measure
from jdllm.decoding.sampling import SamplingParams
from tests.benchmarks.shapes import small


def test_the_longest_step_is_told_beside_the_median():
    made = SimpleNamespace(compiled=3, loaded=1)

    def stream(**_: Any) -> Iterator[None]:
        for seconds in (0.01, 0.01, 0.1, 0.01):
            time.sleep(seconds)
            yield
        made.compiled += 1

    llm: Any = SimpleNamespace(config=small("llada-8b"), executables=made, stream=stream)
    row = measure(llm, 5, SamplingParams(gen_length=8))
    assert row["made"] == 1
    assert row["longest_ms"] >= 100
    assert 10 <= row["median_ms"] < row["longest_ms"]
    assert row["tokens_s"] == pytest.approx(8 / 0.13, rel=0.9)
