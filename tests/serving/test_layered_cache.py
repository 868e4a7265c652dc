"""Requests with a cache whose keys do not fit the KV pool: layer by layer, with keys in host memory."""

import dataclasses

import jax
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.weights import init_params
from jdllm.planning.layered import longest_layered, plan_layered
from jdllm.serving.demands import Kind
from tests.engines import engine_of, finish
from tests.layered import DUAL, LENGTH, PAGES, ROWS, Model, asked, engine_in, layered_of


@pytest.fixture(scope="module", params=["config", "dream_config"])
def model(request: pytest.FixtureRequest) -> Model:
    config = dataclasses.replace(request.getfixturevalue(request.param), num_layers=6)
    return Model(config, init_params(config, jax.random.key(0), "float32"))


SAMPLINGS = [
    DUAL,
    dataclasses.replace(DUAL, temperature=0.8, top_k=5, seed=3, logprobs=3),
    dataclasses.replace(DUAL, transfer="threshold", threshold=0.4, refresh_interval=3),
    dataclasses.replace(DUAL, refresh_delay=1, official_forcing=True),
    dataclasses.replace(DUAL, bad_words=((78,),), logit_bias={7: 3.0}, min_tokens=5, stop_token_ids=(7,)),
    dataclasses.replace(DUAL, cache="head_sparse"),
    dataclasses.replace(DUAL, cache="head_sparse", retention=0.6, pool_kernel=17, refresh_interval=3),
    dataclasses.replace(DUAL, cache="sparse", temperature=0.8, seed=3, logprobs=3),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: f"{sampling.cache}-{sampling.transfer}")
@pytest.mark.parametrize("kept", [0, 2, 6])
@pytest.mark.slow
def test_tokens_are_those_of_the_pool(
    model: Model, executables: Executables, sampling: SamplingParams, kept: int
):
    request, room = asked(model.config, LENGTH, sampling), layered_of(model, kept, sampling=sampling)
    plan = plan_layered(room, len(request.tokens), 0)
    assert plan is not None
    assert (plan.layering.rows, plan.layering.chunk, plan.layering.kept) == (ROWS, 512, kept)
    engine = engine_in(model, room, executables)
    _, [found] = finish(engine, [request])
    _, [paged] = finish(engine_of(model.params, model.config, executables, 768), [request])
    np.testing.assert_array_equal(found.tokens, paged.tokens)
    np.testing.assert_array_equal(found.committed_in, paged.committed_in)
    np.testing.assert_allclose(found.logprobs, paged.logprobs, atol=1e-4)
    np.testing.assert_array_equal(found.likeliest["id"], paged.likeliest["id"])
    assert engine.stats().parts[Kind.LAYERED]
    assert not engine.stats().parts[Kind.REFRESH]


@pytest.mark.slow
def test_others_run_in_their_turn(model: Model, executables: Executables):
    """What fits the pool has it before or behind; what needs no pages may run between two layers."""
    whole = dataclasses.replace(DUAL, cache="none")
    requests = [
        asked(model.config, length, sampling, seed)
        for seed, (length, sampling) in enumerate(
            [(30, DUAL), (LENGTH, DUAL), (40, DUAL), (20, whole), (LENGTH + 9, DUAL)]
        )
    ]
    engine = engine_in(model, layered_of(model, 1), executables)
    _, together = finish(engine, requests)
    pooled = engine_of(model.params, model.config, executables, 768)
    for request, found in zip(requests, together, strict=True):
        _, [alone] = finish(pooled, [request])
        np.testing.assert_array_equal(found.tokens, alone.tokens)
    assert engine.stats().free_pages == PAGES - 1


@pytest.mark.slow
def test_an_aborted_one_leaves_nothing(model: Model, executables: Executables):
    engine, request = engine_in(model, layered_of(model, 0), executables), asked(model.config, LENGTH)
    before = len(jax.live_arrays())
    for steps in (1, 3):
        number = engine.add(request.spec)
        for _ in range(steps):
            engine.step()
        engine.abort(number)
        assert engine.idle
        assert len(jax.live_arrays()) <= before + 2


@pytest.mark.parametrize("cache", ["dual", "head_sparse"])
def test_what_has_no_room_is_refused(model: Model, executables: Executables, cache: str):
    sampling = dataclasses.replace(DUAL, cache=cache)
    room = layered_of(model, 0, sampling=sampling)
    engine, longest = engine_in(model, room, executables), longest_layered(room, 0)
    assert longest > 2 * PAGES * PAGE_ROWS
    engine.add(asked(model.config, longest - 32, sampling).spec)
    with pytest.raises(RequestError, match="KV pool"):
        engine.add(asked(model.config, longest - 31, sampling).spec)
    without_host = engine_in(model, layered_of(model, 0, host=1000, sampling=sampling), executables)
    with pytest.raises(RequestError, match="KV pool"):
        without_host.add(asked(model.config, longest - 32, sampling).spec)


def test_other_caches_keep_to_the_pool(model: Model, executables: Executables):
    engine = engine_in(model, layered_of(model, 0), executables)
    for options in ({"cache": "prefix"}, {"cache": "prompt"}, {"suffix_window": 8}):
        sampling = dataclasses.replace(DUAL, **options)
        with pytest.raises(RequestError, match="KV pool"):
            engine.add(asked(model.config, LENGTH, sampling).spec)
