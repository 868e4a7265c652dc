"""What must not change any token in f32: company, order, chunks, dispatches, budget."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdllm.decoding.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.chunks import ChunkConfig
from jdllm.serving.engine import Engine
from jdllm.serving.request import generation_request

Histories = list[np.ndarray]
Run = Callable[..., Histories]

# Together they evaluate at most 32 head rows in 128 packed rows: one executable for all compositions.
SAMPLING = [
    SamplingParams(gen_length=6, early_stop=False, return_history=True, **options)
    for options in (
        {},
        {"temperature": 1.0, "seed": 1, "block_length": 3},
        {"remasking": "random", "seed": 2, "steps": 3},
        {"temperature": 1.0, "remasking": "random", "seed": 1, "cfg_scale": 1.5},
        {"cfg_scale": 0.5, "block_length": 2},
        {"temperature": 1.0, "seed": 1, "steps": 4},
    )
]
WHOLE = ChunkConfig()
PROMPTS = [np.random.default_rng(i).integers(0, 500, 3 + i) for i in range(len(SAMPLING))]
EVERYONE = range(len(SAMPLING))


@pytest.fixture(scope="module")
def run(params: Params, config: ModelConfig, executables: Executables) -> Run:
    def run(
        which: Sequence[int], chunks: ChunkConfig = WHOLE, budget: int = 128, every_step: bool = False
    ) -> Histories:
        requests = [generation_request(n, PROMPTS[i], SAMPLING[i], config) for n, i in enumerate(which)]
        engine = Engine(params, config, executables, lambda rows, head: chunks, budget)
        for _ in engine.run(requests, every_step=every_step):
            pass
        return [np.stack(request.history) for request in requests]

    return run


@pytest.fixture(scope="module")
def together(run: Run) -> Histories:
    """All requests in one batch."""
    return run(EVERYONE)


def same(actual: Histories, expected: Histories) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("which", EVERYONE)
def test_alone(which: int, run: Run, together: Histories):
    same(run([which]), [together[which]])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(EVERYONE), min_size=1, max_size=5))
def test_any_company_in_any_order(run: Run, together: Histories, which: list[int]):
    same(run(which), [together[i] for i in which])


@pytest.mark.parametrize("chunks", [ChunkConfig(ffn=3, query=2, logits=5), ChunkConfig(logits=32)])
def test_any_chunks(chunks: ChunkConfig, run: Run, together: Histories):
    same(run(EVERYONE, chunks=chunks), together)


def test_one_step_a_dispatch(run: Run, together: Histories):
    same(run(EVERYONE, every_step=True), together)


@pytest.mark.parametrize("budget", [1, 30, 50])
def test_forced_splits(budget: int, run: Run, together: Histories):
    same(run(EVERYONE, budget=budget), together)


def test_seeds_and_nothing_else_tell_equal_requests_apart(run: Run, together: Histories):
    twice = run([1, 1, 3, 3])
    same(twice, [together[i] for i in (1, 1, 3, 3)])
    assert len({history[-1].tobytes() for history in together}) == len(together)
