"""Causal requests whose keys do not fit the KV pool: layer by layer, with keys in host memory."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, tree_bytes
from jdllm.pallas.device import CPU
from jdllm.planning.account import make_account
from jdllm.planning.budget import Budget
from jdllm.planning.layered import Layered, longest_layered, plan_layered
from jdllm.serving.build import make_engine
from jdllm.serving.causal.layered_runner import LayeredRunner
from jdllm.serving.causal.request import causal_spec
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from tests.causal.running import FREE, Build, Oracle, answers, greedy, prompt, run

HOST = 1 << 30
Layers = Callable[..., Engine]


@pytest.fixture
def layers(params: Params, config: ModelConfig, executables: Executables) -> Layers:
    """Engines whose pool has few pages, and that keep `kept` layers of some prompt on the device."""

    def make(kept: int, rows: int, *, pages: int = 1, host: int = HOST, tokens: int = 9) -> Engine:
        account = make_account(
            config,
            "float32",
            None,
            device=CPU,
            max_num_batched_tokens=256,
            weights_bytes=tree_bytes(params),
        )
        model = Layered(config, "float32", Budget(0, 0, host), account.weights)
        budget = Budget(model.reading(rows, 128, tokens) + kept * model.keys_bytes(rows), 0, host)
        account = dataclasses.replace(account, budget=budget, pages=pages)
        return make_engine(params, config, executables, account)

    return make


def model_of(engine: Engine) -> Layered:
    [layered] = [holder for holder in engine.parts.holders if isinstance(holder, LayeredRunner)]
    assert layered.model is not None
    return layered.model


@pytest.mark.parametrize("kept", [0, 1])
def test_tokens_are_those_of_whole_evaluations(
    layers: Layers, config: ModelConfig, oracle: Oracle, kept: int
):
    """A prompt in three chunks, of whose layers some are in host memory."""
    engine, ids = layers(kept, 384), prompt(300)
    plan = plan_layered(model_of(engine), len(ids), 9)
    assert plan is not None
    assert (plan.layering.chunk, plan.layering.kept) == (128, kept)
    [done] = run(engine, [(ids, FREE)], config)
    assert answers([done]) == [greedy(oracle, ids, 9)]
    parts = engine.stats().parts
    assert parts[Kind.LAYERED] == 9
    assert parts[Kind.PREFILL] == parts[Kind.DECODE] == 0


SAMPLED = [
    SamplingParams(max_tokens=9, temperature=0.8, top_k=20, seed=3, early_stop=False),
    SamplingParams(max_tokens=9, repetition_penalty=1.4, early_stop=False, logprobs=4),
    SamplingParams(max_tokens=1),
    SamplingParams(
        max_tokens=9,
        allowed_token_ids=tuple(range(3, 30)),
        logit_bias={9: 1.5},
        min_tokens=4,
        bad_words=tuple((i, i) for i in range(3, 20)),
        early_stop=False,
    ),
]


@pytest.mark.parametrize("sampling", SAMPLED)
@pytest.mark.slow
def test_sampling_is_that_of_the_pool(
    layers: Layers, build: Build, config: ModelConfig, sampling: SamplingParams
):
    ids = prompt(140)
    found, paged = (run(engine, [(ids, sampling)], config) for engine in (layers(0, 256), build()))
    assert answers(found) == answers(paged)
    np.testing.assert_allclose(found[0].logprobs, paged[0].logprobs, atol=1e-4)
    assert found[0].likeliest.shape[1] == sampling.listed
    np.testing.assert_array_equal(found[0].likeliest["id"], paged[0].likeliest["id"])
    np.testing.assert_allclose(found[0].likeliest["logprob"], paged[0].likeliest["logprob"], atol=1e-4)


@pytest.mark.slow
def test_what_fits_the_pool_runs_there_first(layers: Layers, config: ModelConfig, oracle: Oracle):
    engine, lengths = layers(0, 384, pages=4), (30, 300, 40)
    asked = [prompt(length) for length in lengths]
    done = run(engine, [(ids, FREE) for ids in asked], config)
    assert answers(done) == [greedy(oracle, ids, 9) for ids in asked]
    parts = engine.stats().parts
    assert parts[Kind.LAYERED] == 9
    assert parts[Kind.DECODE]
    assert engine.stats().free_pages == 3


def test_an_aborted_one_leaves_nothing(layers: Layers, config: ModelConfig, oracle: Oracle):
    engine, ids = layers(0, 384), prompt(300)
    before = len(jax.live_arrays())
    spec = causal_spec(ids, dataclasses.replace(FREE, max_tokens=9), config)
    for steps in (1, 3):
        request = engine.add(spec)
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        assert engine.idle
        assert len(jax.live_arrays()) <= before + 2
    assert answers(run(engine, [(ids, FREE)], config)) == [greedy(oracle, ids, 9)]


def test_too_little_memory_is_refused_before_anything_runs(layers: Layers, config: ModelConfig):
    engine = layers(0, 384)
    longest = longest_layered(model_of(engine), 9)
    assert longest == 384
    sampling = dataclasses.replace(FREE, max_tokens=9)
    with pytest.raises(RequestError, match=f"the longest prompt that fits is {longest} tokens"):
        engine.add(causal_spec(prompt(longest + 1), sampling, config))
    engine.add(causal_spec(prompt(longest), sampling, config))


def test_host_memory_is_part_of_it(layers: Layers, config: ModelConfig):
    engine = layers(0, 384, host=1000)
    with pytest.raises(RequestError, match="host_memory 1000 B"):
        engine.add(causal_spec(prompt(384), dataclasses.replace(FREE, max_tokens=9), config))
