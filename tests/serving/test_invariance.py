"""What must not change any token in f32, whatever the rule: company, order, chunks, dispatches, budget."""

from collections.abc import Callable, Sequence
from itertools import batched
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from tests.engines import engine_of, finish, generation_request

Histories = list[np.ndarray]
Run = Callable[..., Histories]

LLADA_RULES = {
    "schedule": {},
    "schedule in blocks": {"block_length": 3},
    "random order": {"remasking": "random", "steps": 3},
    "guided": {"cfg_scale": 1.5, "block_length": 2},
    "guided random order": {"cfg_scale": 1.5, "remasking": "random"},
    "threshold": {"transfer": "threshold", "threshold": 0.3, "block_length": 3},
    "factor": {"transfer": "factor", "factor": 2.0},
    "entropy bound": {"transfer": "entropy_bound", "entropy_bound": 3.0, "block_length": 3},
    "margin": {"transfer": "margin", "steps": 4},
}
DREAM_RULES = {
    alg: {"alg": alg, "steps": 3} for alg in ("origin", "maskgit_plus", "topk_margin", "entropy")
} | {
    "confidence_threshold": {"alg": "confidence_threshold", "steps": 3, "threshold": 0.3},
    "drawn order": {"alg": "entropy", "steps": 3, "alg_temp": 0.5},
    "filtered": {"alg": "maskgit_plus", "top_p": 0.8, "top_k": 9, "cfg_scale": 0.5},
    "falling threshold": {"transfer": "falling_threshold", "threshold": 0.4, "threshold_fall": 0.7},
}
SAMPLING = {
    f"{name} at {temperature}": SamplingParams(
        gen_length=6,
        early_stop=False,
        return_history=True,
        temperature=temperature,
        seed=seed,
        **options,
    )
    for seed, (name, options) in enumerate((LLADA_RULES | DREAM_RULES).items())
    for temperature in (0.0, 1.0)
}
NAMES = list(SAMPLING)
WHOLE = ChunkConfig()
PROMPTS = {name: np.random.default_rng(i).integers(0, 500, 3 + i % 5) for i, name in enumerate(NAMES)}

# Any five evaluate at most 32 head rows in 128 packed rows: one executable for each level. In these groups
# someone filters, so that the level is the same.
GROUPS = [[*group, "filtered at 0.0"] for group in batched(NAMES, 4)]
SOME = ["schedule at 1.0", "entropy bound at 0.0", "filtered at 1.0", "origin at 0.0", "threshold at 1.0"]


class Model(NamedTuple):
    """How requests run together, and what each gives by itself."""

    run: Run
    alone: dict[str, np.ndarray]


def model_of(params: Params, config: ModelConfig, executables: Executables) -> Model:
    def run(
        which: Sequence[str], chunks: ChunkConfig = WHOLE, budget: int = 128, every_step: bool = False
    ) -> Histories:
        requests = [generation_request(n, PROMPTS[i], SAMPLING[i], config) for n, i in enumerate(which)]
        engine = engine_of(params, config, executables, budget, chunks=chunks)
        _, requests = finish(engine, requests, updates="every" if every_step else "none")
        return [np.stack(request.history) for request in requests]

    return Model(run, {name: run([name])[0] for name in NAMES})


@pytest.fixture(scope="module")
def llada(params: Params, config: ModelConfig, executables: Executables) -> Model:
    return model_of(params, config, executables)


@pytest.fixture(scope="module")
def dream(dream_params: Params, dream_config: ModelConfig, executables: Executables) -> Model:
    return model_of(dream_params, dream_config, executables)


def slow(value: object):
    return pytest.param(value, marks=pytest.mark.slow)


def check(model: Model, which: Sequence[str], **options: Any) -> None:
    for actual, name in zip(model.run(which, **options), which, strict=True):
        np.testing.assert_array_equal(actual, model.alone[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_any_company_in_any_order(family: str, request: pytest.FixtureRequest):
    model: Model = request.getfixturevalue(family)

    @settings(max_examples=60)
    @given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5))
    def check_company(which: list[str]):
        check(model, which)

    check_company()


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [ChunkConfig(ffn=3, query=2, logits=5), ChunkConfig(logits=32)])
def test_any_chunks(chunks: ChunkConfig, llada: Model):
    for group in GROUPS:
        check(llada, group, chunks=chunks)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llada", slow("dream")])
def test_one_step_a_dispatch(family: str, request: pytest.FixtureRequest):
    for group in GROUPS:
        check(request.getfixturevalue(family), group, every_step=True)


@pytest.mark.parametrize("budget", [1, 30, 50])
def test_forced_splits(budget: int, llada: Model):
    check(llada, SOME, budget=budget)


def test_seeds_and_nothing_else_tell_equal_requests_apart(
    params: Params, config: ModelConfig, executables: Executables
):
    sampling = [SamplingParams(gen_length=6, temperature=1.0, seed=seed) for seed in (1, 1, 2, 1)]
    requests = [generation_request(i, np.arange(4), s, config) for i, s in enumerate(sampling)]
    _, requests = finish(engine_of(params, config, executables, 128), requests)
    first, again, other, third = (request.tokens.tolist() for request in requests)
    assert first == again == third != other
