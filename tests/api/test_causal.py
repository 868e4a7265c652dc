"""Completions and chats of a causal model, whole and streamed."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.serving.demands import Kind
from tests.api.sse import events
from tests.api.words_server import served
from tests.causal_texts import words, write_speaking
from tests.conftest import BUDGET, KV_POOL

PROMPT = [5, 17, 300, 44, 120]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = write_speaking(tmp_path_factory.mktemp("speaking"), "qwen2", "none")
    with LLM(directory, dtype="float32", max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    with served(llm) as client:
        yield client


@pytest.fixture(scope="module")
def tokens(llm: LLM) -> list[int]:
    """What greedy decoding gives."""
    [output] = llm.generate(prompt_token_ids=[PROMPT], sampling=SamplingParams(max_tokens=12))
    return output.token_ids


def test_a_completion_is_what_the_library_gives(client: TestClient, tokens: list[int]):
    body = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 1}
    answer = client.post("/v1/completions", json=body).json()
    choice = answer["choices"][0]
    assert choice["text"] == f" {words(*tokens)}"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 12
    assert answer["usage"]["completion_tokens"] == 12


def test_a_stream_has_the_same_text(client: TestClient, tokens: list[int]):
    body = {"prompt": words(*PROMPT), "max_tokens": 12, "stream": True}
    told = events(client.post("/v1/completions", json=body).text)
    assert "".join(part["choices"][0]["text"] for _, part in told) == f" {words(*tokens)}"


def test_a_stream_comes_in_shorter_dispatches(client: TestClient, llm: LLM):
    """Of 12 tokens the first comes with the prompt, and the others at most four at a time."""

    def decodes(**stream: bool) -> int:
        before = llm.engine.stats().parts[Kind.DECODE]
        assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, **stream}).is_success
        return llm.engine.stats().parts[Kind.DECODE] - before

    assert (decodes(stream=True), decodes()) == (3, 1)


def test_a_stop_string_may_begin_with_the_space_of_a_word(client: TestClient, tokens: list[int]):
    """The first word of an answer has its space, and an echo is prompt and answer as one text."""
    body = {"prompt": words(*PROMPT), "max_tokens": 12, "stop": f" {words(tokens[0])}"}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("", "stop", tokens[:1])
    across = body | {"stop": words(PROMPT[-1], tokens[0]), "echo": True}
    choice = client.post("/v1/completions", json=across).json()["choices"][0]
    assert choice["text"] == words(*PROMPT, *tokens)


def test_every_token_is_an_event(client: TestClient, tokens: list[int]):
    body = {"prompt": PROMPT, "max_tokens": 12, "stream": True, "stream_mode": "denoise"}
    told = events(client.post("/v1/completions", json=body).text)
    start = told[0][1]
    assert (start["texts"][:2], start["texts"][-1]) == ([" w5", " w17"], None)
    steps = [event for name, event in told if name == "step"]
    assert [step["token_ids"] for step in steps] == [[token] for token in tokens]
    assert told[-1][1]["text"] == f" {words(*tokens)}"


@pytest.mark.slow
def test_what_was_read_before_is_counted(client: TestClient):
    body = {"prompt": [*range(2, 150)], "max_tokens": 2}
    usage = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    assert [one["prompt_tokens_details"] for one in usage] == [{"cached_tokens": 0}, {"cached_tokens": 128}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_changes_the_text(client: TestClient, tokens: list[int], name: str):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, name: 1.9})
    assert answer.status_code == 200, answer.text
    ids = [int(word[1:]) for word in answer.json()["choices"][0]["text"].split()]
    assert len(set(ids)) >= len(set(tokens))


@pytest.mark.parametrize("field", [{"steps": 4}, {"cache": "dual"}, {"block_length": 4}])
def test_fields_of_denoising_are_refused(client: TestClient, field: dict):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **field})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(field))


def test_a_suffix_is_refused(client: TestClient):
    answer = client.post("/v1/completions", json={"prompt": "w5", "suffix": "w7", "max_tokens": 4})
    assert answer.status_code == 400
    assert "mask" in answer.json()["error"]["message"]
