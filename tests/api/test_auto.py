"""Requests that leave to the engine how they generate, over HTTP and on the command line."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from jdllm.cli import app
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.serving import ways
from tests.api.sse import events
from tests.api.words_server import served
from tests.causal_texts import words, write_speaking
from tests.cli.helpers import as_arguments, outputs
from tests.conftest import KV_POOL
from tests.helpers import Golden

PROMPT = [5, 17, 300, 44, 120]
ASKED: dict[str, Any] = {"max_tokens": 12, "generation_mode": "auto", "block_length": 8}
NAMES = ["autoregressive", "self_speculation"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = write_speaking(tmp_path_factory.mktemp("speaking"), "sdar", "none")
    with LLM(directory, dtype="float32", max_num_batched_tokens=64, kv_pool=KV_POOL, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    with served(llm) as client:
        yield client


@pytest.fixture(scope="module")
def token_ids(llm: LLM) -> list[int]:
    """Of block length 1."""
    sampling = SamplingParams(max_tokens=12, block_length=1, early_stop=False)
    [output] = llm.generate(prompt_token_ids=[PROMPT], sampling=sampling)
    return output.token_ids


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way that the engine chooses."""
    chosen = NAMES.index(request.param)
    monkeypatch.setattr(ways, "quickest", lambda expected: chosen)
    return request.param


def test_an_answer_names_the_way(client: TestClient, token_ids: list[int], name: str):
    body = {"prompt": PROMPT, "ignore_eos": True, **ASKED}
    [choice] = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"].strip() == words(*token_ids)
    assert choice["generation_mode"] == name
    [other] = client.post("/v1/completions", json=body | {"generation_mode": None}).json()["choices"]
    assert "generation_mode" not in other


def test_streams(client: TestClient, token_ids: list[int], name: str):
    body = {"prompt": PROMPT, "ignore_eos": True, "stream": True, **ASKED}
    told = events(client.post("/v1/completions", json=body).text)
    assert "".join(part["choices"][0]["text"] for _, part in told).strip() == words(*token_ids)
    steps = events(client.post("/v1/completions", json=body | {"stream_mode": "denoise"}).text)
    [end] = [part for kind, part in steps if kind == "end"]
    assert (end["token_ids"], end["generation_mode"]) == (token_ids, name)


def test_draws_are_refused(client: TestClient):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 1.0, **ASKED})
    assert answer.status_code == 400
    assert "leave temperature at 0.0" in answer.json()["error"]["message"]


def test_the_command_line(llm: LLM, token_ids: list[int], name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.cli.generate.load_model", lambda *_: llm)
    options = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    given = as_arguments({"token_ids": [PROMPT], "gen_length": ASKED["max_tokens"], **options})
    [output] = outputs(
        CliRunner().invoke(
            app, ["generate", "--model", str(Golden("sdar").directory), *given, "--no-early-stop", "--json"]
        )
    )
    assert (output["token_ids"], output["generation_mode"]) == (token_ids, name)
