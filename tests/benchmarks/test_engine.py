"""The engine's benchmarks: whose time is counted, what is drawn, what has grown."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.engine import compilations, draw_requests, grown, measure_overhead, one_by_one, serve
from jdllm.compiling.executables import Executables
from jdllm.decoding.registry import cache_names
from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from tests.benchmarks.shapes import small

SECONDS = 0.05


def slow_sum(x: jax.Array, words: jax.Array) -> jax.Array:
    """Takes the device `SECONDS`."""

    def wait(total: np.ndarray) -> np.ndarray:
        time.sleep(SECONDS)
        return total

    return jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x.sum() + words.sum())


def test_device_time_is_that_of_each_call_however_they_overlap():
    executables = Executables("cpu")
    x, words = jnp.ones(8), np.ones(4, np.float32)
    executables.call(slow_sum, x, words)
    with one_by_one() as device:
        results = [executables.call(slow_sum, x, words) for _ in range(3)]
    assert [float(result) for result in results] == [12.0] * 3
    assert device.calls == 3
    assert 3 * SECONDS - device.host_seconds <= device.seconds < 3 * SECONDS + 0.5
    assert float(executables.call(slow_sum, x, words)) == 12.0
    assert device.calls == 3


def test_arguments_that_are_given_away_are_used_once():
    executables, x = Executables("cpu"), jnp.ones(8)
    with one_by_one() as device:
        for _ in range(3):
            x = executables.call(lambda x: x + 1, x, donate=("x",))
    np.testing.assert_array_equal(x, np.full(8, 4.0))
    assert device.calls == 3


def test_random_requests_have_every_rule_and_cache_and_keep_to_their_bounds():
    lengths, sampling = draw_requests(np.random.default_rng(0), 1000, 400)
    assert min(lengths) < 10
    assert 300 < max(lengths) <= 400
    assert {s.cache for s in sampling} == set(cache_names())
    assert {s.transfer for s in sampling} == {"schedule", "threshold", "factor", "entropy_bound", "margin"}
    assert {s.gen_length % s.block_length for s in sampling if s.block_length} == {0}
    again = draw_requests(np.random.default_rng(0), 1000, 400)
    assert again == (lengths, sampling)


def test_compilations_are_counted_while_they_are_listened_to():
    def compile_anew() -> None:
        jax.jit(lambda x: x + np.random.default_rng().random()).lower(jnp.ones(3)).compile()

    compile_anew()
    with compilations() as found:
        compile_anew()
        compile_anew()
    compile_anew()
    assert len(found) == 2
    assert all(seconds > 0 for seconds in found)


@pytest.mark.parametrize(("values", "expected"), [([1, 9, 5, 5, 6, 6, 8, 8], 3.0), ([1, 2, 3], 0.0)])
def test_growth_is_between_the_second_and_the_last_quarter(values: list[float], expected: float):
    assert grown([{"host_mib": value} for value in values], "host_mib") == expected


@pytest.mark.slow
def test_a_small_model():
    model = Transformer(small("llada-8b"), rngs=nnx.Rngs(0), dtype="float32")
    with LLM(model, max_num_batched_tokens=256, progress=False) as llm:
        sampling = SamplingParams(gen_length=8, block_length=4, cache="dual", early_stop=False)
        row = measure_overhead(llm, [5, 5], sampling, repeats=1)
        assert row["evaluated"] == row["evaluated_alone"] == 8
        assert row["device_s"] > 0
        assert row["overhead"] == pytest.approx(1 - row["device_s"] / row["seconds"])
        rows: list[Any] = list(serve(llm, 2, 3, 20, same=True))
    assert rows[0]["compiled"] > rows[1]["compiled"] == 0
    assert all(row["host_mib"] > 1 and row["arrays_mib"] > 0 for row in rows)
