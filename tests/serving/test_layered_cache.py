"""Requests with a dual cache whose keys do not fit the KV pool: layer by layer, with keys in host memory."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, init_params, tree_bytes
from jdllm.pallas.device import CPU
from jdllm.planning.account import make_account
from jdllm.planning.budget import Budget
from jdllm.planning.layered import Layered, longest_layered, plan_layered
from jdllm.serving.build import make_engine
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from tests.engines import engine_of, finish, generation_request

HOST, ROWS, LENGTH, PAGES = 1 << 30, 1024, 560, 3
DUAL = SamplingParams(gen_length=32, block_length=16, steps=8, cache="dual", early_stop=False)


class Model(NamedTuple):
    """Six layers with random weights."""

    config: ModelConfig
    params: Params


@pytest.fixture(scope="module", params=["config", "dream_config"])
def model(request: pytest.FixtureRequest) -> Model:
    config = dataclasses.replace(request.getfixturevalue(request.param), num_layers=6)
    return Model(config, init_params(config, jax.random.key(0), "float32"))


def layered_of(model: Model, kept: int, *, host: int = HOST) -> Layered:
    """The room in which `kept` layers of `ROWS` rows stay on the device while they are refreshed."""
    weights, steps = tree_bytes(model.params), 64 << 20
    unlimited = Layered(model.config, "float32", Budget(0, 0, host), weights, steps)
    device = unlimited.reading(ROWS, 512, 0) + kept * unlimited.keys_bytes(ROWS)
    return unlimited._replace(budget=Budget(device, 0, host))


def engine_in(model: Model, room: Layered, executables: Executables) -> Engine:
    """An engine whose pool has few pages, all of the room but what steps of others need."""
    account = make_account(
        model.config, "float32", None, device=CPU, max_num_batched_tokens=256, weights_bytes=room.weights
    )
    pool = room.budget.device - room.weights - room.steps
    account = dataclasses.replace(account, budget=room.budget, pages=PAGES, page_bytes=-(-pool // PAGES))
    return make_engine(model.params, model.config, executables, account)


def asked(config: ModelConfig, length: int, sampling: SamplingParams = DUAL, seed: int = 0) -> Request:
    return generation_request(seed, np.random.default_rng(seed).integers(1, 100, length), sampling, config)


SAMPLINGS = [
    DUAL,
    dataclasses.replace(DUAL, temperature=0.8, top_k=5, seed=3, logprobs=3),
    dataclasses.replace(DUAL, transfer="threshold", threshold=0.4, refresh_interval=3),
    dataclasses.replace(DUAL, refresh_delay=1, official_forcing=True),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.transfer)
@pytest.mark.parametrize("kept", [0, 2, 6])
@pytest.mark.slow
def test_tokens_are_those_of_the_pool(
    model: Model, executables: Executables, sampling: SamplingParams, kept: int
):
    request, room = asked(model.config, LENGTH, sampling), layered_of(model, kept)
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


def test_what_has_no_room_is_refused(model: Model, executables: Executables):
    room = layered_of(model, 0)
    engine, longest = engine_in(model, room, executables), longest_layered(room, 0)
    assert longest > PAGES * PAGE_ROWS
    engine.add(asked(model.config, longest - 32).spec)
    with pytest.raises(RequestError, match=f"the longest that fits has {longest} tokens"):
        engine.add(asked(model.config, longest - 31).spec)
    with pytest.raises(RequestError, match="host_memory 1000 B"):
        engine_in(model, layered_of(model, 0, host=1000), executables).add(
            asked(model.config, longest - 32).spec
        )


def test_other_caches_keep_to_the_pool(model: Model, executables: Executables):
    engine = engine_in(model, layered_of(model, 0), executables)
    for options in ({"cache": "prefix"}, {"cache": "head_sparse"}, {"suffix_window": 8}):
        sampling = dataclasses.replace(DUAL, **options)
        with pytest.raises(RequestError, match="KV pool"):
            engine.add(asked(model.config, LENGTH, sampling).spec)
