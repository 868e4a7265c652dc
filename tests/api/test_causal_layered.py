"""Prompts of a causal model that the KV pool cannot hold, over HTTP."""

from collections.abc import Iterator

import numpy as np
import pytest
from fastapi.testclient import TestClient

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.serving.demands import Kind
from tests.api.words_server import served
from tests.conftest import BUDGET, KV_POOL
from tests.helpers import Golden

PROMPT = np.random.default_rng(0).integers(2, 400, 150).tolist()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    sizes = {"memory": "40MiB", "kv_pool": 3 * 2**15}
    with LLM(Golden("llama").directory, max_num_batched_tokens=64, progress=False, **sizes) as llm:
        assert llm.account.pages == 3
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    with served(llm) as client:
        yield client


@pytest.mark.slow
def test_an_answer_is_that_of_a_larger_pool(client: TestClient, llm: LLM):
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    with LLM(Golden("llama").directory, max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as large:
        sampling = SamplingParams(max_tokens=6, early_stop=False)
        [output] = large.generate(prompt_token_ids=[PROMPT], sampling=sampling)
    assert choice["token_ids"] == output.token_ids
    assert llm.engine.stats().parts[Kind.LAYERED] == 6


def test_the_longest_is_told_and_held(client: TestClient, llm: LLM):
    [model] = client.get("/v1/models").json()["data"]
    longest = model["max_model_len"]
    assert longest == llm.engine.longest_served > 1000
    told = client.post("/v1/completions", json={"prompt": [5] * longest, "max_tokens": 6})
    assert told.status_code == 400
    assert str(longest) in told.json()["error"]["message"]
