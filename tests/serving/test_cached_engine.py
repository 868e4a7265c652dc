"""Cached requests in one engine: company, waiting and refusals."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.outputs import RequestOutput
from jdllm.planning.buckets import MAX_STEPS_PER_DISPATCH

pytestmark = pytest.mark.usefixtures("shared_executables")

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
    {"cache": "prompt", "temperature": 0.8, "seed": 1},
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


@pytest.fixture(scope="module", params=["few", "all"])
def company(request: pytest.FixtureRequest, llm: LLM) -> Company:
    prompts, sampling = mixed(COMPANIES[request.param])
    return Company(prompts, sampling, llm.generate(prompt_token_ids=prompts, sampling=sampling))


@pytest.mark.slow
def test_a_request_is_the_same_alone_and_in_company(llm: LLM, company: Company):
    for prompt, sampling, together in zip(*company, strict=True):
        (alone,) = llm.generate(prompt_token_ids=[prompt], sampling=sampling)
        same(alone, together)


@pytest.mark.slow
def test_order_and_the_length_of_dispatches_do_not_matter(llm: LLM, company: Company):
    prompts, sampling, together = company
    updates = []
    outputs = llm.generate(prompt_token_ids=prompts[::-1], sampling=sampling[::-1], on_step=updates.append)
    for a, b in zip(outputs[::-1], together, strict=True):
        same(a, b)
    assert len(updates) == sum(o.nfe for o in outputs)


@pytest.mark.slow
def test_caches_change_something(llm: LLM, company: Company):
    """Else nothing here would notice a cache that is not used."""

    def changed(prompt: np.ndarray, sampling: SamplingParams, cached: RequestOutput) -> bool:
        exact = dataclasses.replace(sampling, cache="none")
        (output,) = llm.generate(prompt_token_ids=[prompt], sampling=exact)
        return output.token_ids != cached.token_ids

    assert any(changed(*request) for request in zip(*company, strict=True))


@pytest.mark.slow
def test_blocks_of_more_steps_than_a_dispatch_may_do(llm: LLM):
    sampling = dataclasses.replace(PLAIN, cache="dual", gen_length=80, block_length=80)
    prompt = [np.arange(1, 9)]
    (alone,) = llm.generate(prompt_token_ids=prompt, sampling=sampling)
    (stepwise,) = llm.generate(prompt_token_ids=prompt, sampling=sampling, on_step=lambda _: None)
    assert alone.nfe == 80 > MAX_STEPS_PER_DISPATCH
    same(alone, stepwise)


@pytest.mark.slow
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
