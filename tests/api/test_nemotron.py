"""Completions of a model that generates in several ways: each request chooses its own."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from jdllm.llm import LLM
from tests.api.sse import events
from tests.api.words_server import served
from tests.blocks.recorded_nemotron import autoregressive_runs, diffusion_runs, speculative_runs
from tests.causal_texts import words, write_speaking
from tests.conftest import BUDGET, KV_POOL

DIFFUSION, AUTOREGRESSIVE = diffusion_runs()[2], autoregressive_runs()[1]
SPECULATIVE = speculative_runs(adapter=False)[1]
ASKED = {
    "diffusion": {"max_tokens": 32, "block_length": 16, "transfer": "threshold", "threshold": 0.3},
    "autoregressive": {"max_tokens": 24, "generation_mode": "autoregressive"},
    "self_speculation": {"max_tokens": 40, "generation_mode": "self_speculation", "block_length": 16},
}
RUNS = dict(zip(ASKED, (DIFFUSION, AUTOREGRESSIVE, SPECULATIVE), strict=True))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    directory = write_speaking(tmp_path_factory.mktemp("speaking"), "nemotron_labs_diffusion", "none")
    with (
        LLM(
            directory, dtype="float32", plain_drafts=True, max_num_batched_tokens=BUDGET, kv_pool=KV_POOL
        ) as llm,
        served(llm) as client,
    ):
        yield client


@pytest.mark.parametrize("mode", ASKED)
def test_a_stream_has_the_recorded_text(client: TestClient, mode: str):
    body = {"prompt": RUNS[mode].prompt.tolist(), "stream": True, **ASKED[mode]}
    told = events(client.post("/v1/completions", json=body).text)
    assert "".join(part["choices"][0]["text"] for _, part in told) == f" {words(*RUNS[mode].output or ())}"


def test_an_echo_has_the_likelihood_of_each_token(client: TestClient):
    """Each token of a recorded answer is the best one there."""
    ids = [*AUTOREGRESSIVE.prompt.tolist(), *AUTOREGRESSIVE.output]
    body = {"prompt": ids, "max_tokens": 0, "logprobs": 1, "echo": True}
    [choice] = client.post("/v1/completions", json=body).json()["choices"]
    told = choice["logprobs"]
    assert told["kind"] == "log_likelihood"
    begin = len(AUTOREGRESSIVE.prompt)
    for token, top in zip(told["tokens"][begin:], told["top_logprobs"][begin:], strict=True):
        assert list(top) == [token]


def test_a_mode_that_is_not_there(client: TestClient):
    answer = client.post("/v1/completions", json={"prompt": [5], "generation_mode": "spoken"})
    assert answer.status_code == 400
    assert "generation_mode" in answer.json()["error"]["message"]
