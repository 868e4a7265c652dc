"""Cached requests in one engine: company, waiting and refusals."""

import dataclasses
import gc

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


def mixed() -> tuple[list[np.ndarray], list[SamplingParams]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 100, 5 + 17 * i) for i in range(len(SETTINGS))]
    return prompts, [dataclasses.replace(PLAIN, **options) for options in SETTINGS]


def same(a: RequestOutput, b: RequestOutput) -> None:
    assert a.nfe == b.nfe
    np.testing.assert_array_equal(a.history, b.history)


@pytest.fixture(scope="module")
def llm(config: ModelConfig, params: Params) -> LLM:
    """All requests in one batch."""
    return LLM(Transformer(config, params), max_num_batched_tokens=2048)


@pytest.fixture(scope="module")
def together(llm: LLM) -> list[RequestOutput]:
    prompts, sampling = mixed()
    return llm.generate(prompt_token_ids=prompts, sampling=sampling)


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_a_request_is_the_same_alone_and_in_company(index: int, llm: LLM, together: list[RequestOutput]):
    prompts, sampling = mixed()
    (alone,) = llm.generate(prompt_token_ids=[prompts[index]], sampling=sampling[index])
    same(alone, together[index])


def test_order_and_the_length_of_dispatches_do_not_matter(llm: LLM, together: list[RequestOutput]):
    prompts, sampling = mixed()
    updates = []
    outputs = llm.generate(prompt_token_ids=prompts[::-1], sampling=sampling[::-1], on_step=updates.append)
    for a, b in zip(outputs[::-1], together, strict=True):
        same(a, b)
    assert len(updates) == sum(o.nfe for o in outputs)


def test_caches_change_something(llm: LLM, together: list[RequestOutput]):
    """Else nothing here would notice a cache that is not used."""
    prompts, sampling = mixed()
    exact = [dataclasses.replace(s, cache="none") for s in sampling]
    outputs = llm.generate(prompt_token_ids=prompts, sampling=exact)
    assert any(a.token_ids != b.token_ids for a, b in zip(outputs, together, strict=True))


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
def runner(params, config) -> StepRunner:
    return StepRunner(params, config, Executables("cpu"))


def limited(runner: StepRunner, params, config, monkeypatch: pytest.MonkeyPatch, pages: int) -> Engine:
    """An engine whose pool has at most `pages` pages."""
    cache = CachedRunner(params, config, Executables("cpu"), max_pages=pages, max_num_logits=64)
    monkeypatch.setattr(runner, "cached", lambda rows: cache)
    return Engine(runner, config, 4096)


def requests(config, lengths: list[int]) -> list[Request]:
    sampling = dataclasses.replace(PLAIN, cache="dual", gen_length=8)
    return [generation_request(i, np.arange(1, n + 1), sampling, config) for i, n in enumerate(lengths)]


def test_requests_share_a_dispatch(runner, config):
    """Each step of one is followed by the same step of the others, not by its own next one."""
    order = [update.request for update in Engine(runner, config, 4096).run(requests(config, [60, 60, 50]))]
    assert order[:6] == [0, 1, 2, 0, 1, 2]


def test_requests_wait_for_pages(runner, params, config, monkeypatch):
    engine = limited(runner, params, config, monkeypatch, pages=3)
    asked = requests(config, [60, 60, 50])  # of two pages, two and one: the pool has two
    order = [update.request for update in engine.run(asked)]
    assert all(r.finished for r in asked)
    assert order == sorted(order)
    assert engine._cache._pages.free_pages == engine._cache._pages.pages - 1


def test_a_request_that_can_never_fit_is_refused(runner, params, config, monkeypatch):
    engine = limited(runner, params, config, monkeypatch, pages=3)
    with pytest.raises(KvPoolError, match="needs 3 pages of the KV pool for 138 rows, and 2 of 2 are free"):
        list(engine.run(requests(config, [130])))
    assert engine._cache._pages.free_pages == 2


def test_an_abandoned_run_frees_its_pages(runner, params, config, monkeypatch):
    engine = limited(runner, params, config, monkeypatch, pages=9)
    run = engine.run(requests(config, [60, 60]))
    next(run)
    del run
    gc.collect()
    assert engine._cache._pages.free_pages == engine._cache._pages.pages - 1


def test_a_budget_bounds_the_pool_and_the_steps(params, config):
    """A budget with room for little more than the weights has no room for a pool."""
    roomy = StepRunner(params, config, Executables("cpu"), budget=Budget(64 << 20, overhead=0))
    assert list(Engine(roomy, config, 256).run(requests(config, [20])))
    tight = StepRunner(params, config, Executables("cpu"), budget=Budget(10 << 20, overhead=0))
    with pytest.raises((KvPoolError, MemoryBudgetError)):
        list(Engine(tight, config, 256).run(requests(config, [100])))


def test_a_step_that_exceeds_the_limit_is_refused(runner, params, config, monkeypatch):
    limit = Limit(device=1 << 20, fixed=(1 << 20) - 1, longest=77)
    cache = CachedRunner(params, config, Executables("cpu"), max_pages=None, max_num_logits=64, limit=limit)
    monkeypatch.setattr(runner, "cached", lambda rows: cache)
    with pytest.raises(MemoryBudgetError, match=r"a pool of 16 pages .* the longest .* is 77 tokens"):
        list(Engine(runner, config, 4096).run(requests(config, [20])))
