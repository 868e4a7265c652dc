"""Cached requests in one engine: company, waiting and refusals."""

import dataclasses
import gc
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from jdllm.decoding.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import KvPoolError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.module import Transformer
from jdllm.models.weights import Params
from jdllm.outputs import RequestOutput
from jdllm.planning.buckets import MAX_STEPS_PER_DISPATCH
from jdllm.planning.budget import Budget, MemoryBudgetError
from jdllm.serving.cached_runner import CachedRunner, Limit
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request, generation_request
from jdllm.serving.runner import StepRunner

PLAIN = SamplingParams(gen_length=16, block_length=8, early_stop=False, return_history=True)
SETTINGS = [
    {},
    {"cache": "prefix", "gen_length": 24},
    {"cache": "dual", "transfer": "threshold", "threshold": 0.3},
    {"cache": "dual", "temperature": 0.8, "seed": 3},
    {"cache": "selective", "refresh_interval": 3},
    {"cache": "sparse", "retention": 0.4, "pool_kernel": 5},
    {"cache": "head_sparse", "retention": 0.6, "transfer": "factor"},
    {"cache": "head_sparse", "refresh_delay": 0, "refresh_interval": 4, "block_length": 16},
]


# Every size of batch and every pool width is an executable of seconds; the last of the few fills two pages.
COMPANIES = {"few": (0, 3, 4, 6), "all": tuple(range(len(SETTINGS)))}


class Company(NamedTuple):
    """Requests, and what they give in one batch."""

    prompts: list[np.ndarray]
    sampling: list[SamplingParams]
    outputs: list[RequestOutput]


def mixed(which: Sequence[int]) -> tuple[list[np.ndarray], list[SamplingParams]]:
    prompts = [np.random.default_rng(i).integers(1, 100, 5 + 17 * i) for i in which]
    return prompts, [dataclasses.replace(PLAIN, **SETTINGS[i]) for i in which]


def same(a: RequestOutput, b: RequestOutput) -> None:
    assert a.nfe == b.nfe
    np.testing.assert_array_equal(a.history, b.history)


@pytest.fixture(scope="module")
def llm(config: ModelConfig, params: Params) -> LLM:
    """All requests in one batch."""
    return LLM(Transformer(config, params), max_num_batched_tokens=2048)


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def company(request: pytest.FixtureRequest, llm: LLM) -> Company:
    prompts, sampling = mixed(COMPANIES[request.param])
    return Company(prompts, sampling, llm.generate(prompt_token_ids=prompts, sampling=sampling))


def test_a_request_is_the_same_alone_and_in_company(llm: LLM, company: Company):
    for prompt, sampling, together in zip(*company, strict=True):
        (alone,) = llm.generate(prompt_token_ids=[prompt], sampling=sampling)
        same(alone, together)


def test_order_and_the_length_of_dispatches_do_not_matter(llm: LLM, company: Company):
    prompts, sampling, together = company
    updates = []
    outputs = llm.generate(prompt_token_ids=prompts[::-1], sampling=sampling[::-1], on_step=updates.append)
    for a, b in zip(outputs[::-1], together, strict=True):
        same(a, b)
    assert len(updates) == sum(o.nfe for o in outputs)


def test_caches_change_something(llm: LLM, company: Company):
    """Else nothing here would notice a cache that is not used."""

    def changed(prompt: np.ndarray, sampling: SamplingParams, cached: RequestOutput) -> bool:
        exact = dataclasses.replace(sampling, cache="none")
        (output,) = llm.generate(prompt_token_ids=[prompt], sampling=exact)
        return output.token_ids != cached.token_ids

    assert any(changed(*request) for request in zip(*company, strict=True))


def test_blocks_of_more_steps_than_a_dispatch_may_do(llm: LLM):
    sampling = dataclasses.replace(PLAIN, cache="dual", gen_length=80, block_length=80)
    prompt = [np.arange(1, 9)]
    (alone,) = llm.generate(prompt_token_ids=prompt, sampling=sampling)
    (stepwise,) = llm.generate(prompt_token_ids=prompt, sampling=sampling, on_step=lambda _: None)
    assert alone.nfe == 80 > MAX_STEPS_PER_DISPATCH
    same(alone, stepwise)


def test_keeping_everything_is_a_dual_cache(llm: LLM):
    prompt = [np.random.default_rng(1).integers(1, 100, 40)]
    dual = dataclasses.replace(PLAIN, cache="dual")
    everything = dataclasses.replace(PLAIN, cache="head_sparse", retention=1.0, refresh_delay=0)
    (a,), (b,) = (llm.generate(prompt_token_ids=prompt, sampling=s) for s in (dual, everything))
    np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_refreshing_at_every_step_is_exact(llm: LLM):
    prompt = [np.random.default_rng(2).integers(1, 100, 40)]
    always = dataclasses.replace(PLAIN, cache="dual", refresh_interval=1)
    (a,), (b,) = (llm.generate(prompt_token_ids=prompt, sampling=s) for s in (PLAIN, always))
    same(a, b)


@pytest.fixture
def runner(params: Params, config: ModelConfig, executables: Executables) -> StepRunner:
    return StepRunner(params, config, executables)


@pytest.fixture
def limited(runner: StepRunner, params, config, executables, monkeypatch: pytest.MonkeyPatch):
    """Builds engines whose pool has at most so many pages, or whose steps have a limit."""

    def build(pages: int | None, limit: Limit | None = None) -> Engine:
        cache = CachedRunner(params, config, executables, max_pages=pages, max_num_logits=64, limit=limit)
        monkeypatch.setattr(runner, "cached", lambda rows: cache)
        return Engine(runner, config, 4096)

    return build


def requests(config, lengths: list[int]) -> list[Request]:
    sampling = dataclasses.replace(PLAIN, cache="dual", gen_length=8)
    return [generation_request(i, np.arange(1, n + 1), sampling, config) for i, n in enumerate(lengths)]


def test_requests_share_a_dispatch(runner, config):
    """Each step of one is followed by the same step of the others, not by its own next one."""
    order = [update.request for update in Engine(runner, config, 4096).run(requests(config, [20, 20, 10]))]
    assert order[:6] == [0, 1, 2, 0, 1, 2]


def test_requests_wait_for_pages(limited, config):
    engine = limited(pages=3)
    asked = requests(config, [60, 60, 50])  # of two pages, two and one: the pool has two
    order = [update.request for update in engine.run(asked)]
    assert all(r.finished for r in asked)
    assert order == sorted(order)
    assert engine._cache._pages.free_pages == engine._cache._pages.pages - 1


def test_a_request_that_can_never_fit_is_refused(limited, config):
    engine = limited(pages=3)
    with pytest.raises(KvPoolError, match="needs 3 pages of the KV pool for 138 rows, and 2 of 2 are free"):
        list(engine.run(requests(config, [130])))
    assert engine._cache._pages.free_pages == 2


def test_an_abandoned_run_frees_its_pages(limited, config):
    engine = limited(pages=3)
    run = engine.run(requests(config, [20, 20]))
    next(run)
    assert engine._cache._pages.free_pages == 0
    del run
    gc.collect()
    assert engine._cache._pages.free_pages == engine._cache._pages.pages - 1


def test_a_budget_bounds_the_pool_and_the_steps(params, config, executables):
    """A budget with room for little more than the weights has no room for a pool."""
    roomy = StepRunner(params, config, executables, budget=Budget(64 << 20, overhead=0))
    assert list(Engine(roomy, config, 256).run(requests(config, [20])))
    tight = StepRunner(params, config, executables, budget=Budget(10 << 20, overhead=0))
    with pytest.raises((KvPoolError, MemoryBudgetError)):
        list(Engine(tight, config, 256).run(requests(config, [100])))


def test_a_step_that_exceeds_the_limit_is_refused(limited, config):
    engine = limited(pages=None, limit=Limit(device=1 << 20, fixed=(1 << 20) - 1, longest=77))
    with pytest.raises(MemoryBudgetError, match=r"a pool of 16 pages .* the longest .* is 77 tokens"):
        list(engine.run(requests(config, [20])))
