"""Completions and chats of a block model, whole and streamed."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.api.sse import events
from tests.api.words_server import served
from tests.causal_texts import words, write_speaking
from tests.conftest import BUDGET, KV_POOL

PROMPT = [5, 17, 300, 44, 120]
ASKED = {
    "max_tokens": 12,
    "block_length": 8,
    "small_block_length": 4,
    "transfer": "threshold",
    "threshold": 0.3,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = write_speaking(tmp_path_factory.mktemp("speaking"), "fast_dllm_v2", "none")
    sizes = {"max_num_batched_tokens": BUDGET, "kv_pool": KV_POOL}
    with LLM(directory, dtype="float32", hf_overrides={"mask_token_id": 509}, **sizes) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    with served(llm) as client:
        yield client


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    [output] = llm.generate(prompt_token_ids=[PROMPT], sampling=SamplingParams(**ASKED))
    assert len(output.token_ids) == 12
    return f" {words(*output.token_ids)}"


def test_a_completion_is_what_the_library_gives(client: TestClient, text: str):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "logprobs": 1, **ASKED}).json()
    [choice] = answer["choices"]
    assert choice["text"] == text
    assert len(choice["logprobs"]["token_logprobs"]) == 12
    assert answer["usage"]["completion_tokens"] == 12


def test_a_stream_has_the_same_text(client: TestClient, text: str):
    body = {"prompt": words(*PROMPT), "stream": True, **ASKED}
    told = events(client.post("/v1/completions", json=body).text)
    assert "".join(part["choices"][0]["text"] for _, part in told) == text


@pytest.mark.parametrize(
    ("route", "body", "told"),
    [
        ("/v1/completions", {"prompt": PROMPT, "cache": "dual"}, "leave cache at 'none'"),
        (
            "/v1/completions",
            {"prompt": PROMPT, "editing_threshold": 0.5},
            "whose rows predict their own token",
        ),
        ("/v1/infill", {"token_ids": [509, 5]}, "position 0 is masked"),
        (
            "/v1/infill",
            {"parts": ["w5", {"type": "choice", "options": ["w6", "w7"]}]},
            "choose is for models that see whole sequences",
        ),
    ],
    ids=["cache", "editing", "first mask", "choice"],
)
def test_what_it_does_not_do_is_refused(client: TestClient, route: str, body: dict[str, object], told: str):
    answer = client.post(route, json=body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_an_infilling_is_what_the_library_gives(client: TestClient, llm: LLM):
    ids = [*PROMPT, 509, 509, 7, 8, 509, 9]
    sampling: dict[str, Any] = {"block_length": 4, "steps": 6}
    [expected] = llm.infill(token_ids=[ids], sampling=SamplingParams(**sampling))
    [choice] = client.post("/v1/infill", json={"token_ids": ids, **sampling}).json()["choices"]
    assert choice["token_ids"] == expected.token_ids
    assert [(slot["start"], slot["stop"]) for slot in choice["slots"]] == [(5, 7), (9, 10)]
    assert choice["slots"][1]["token_ids"] == expected.token_ids[9:10]
    parts = [words(*PROMPT), {"type": "text", "max_tokens": 2}, words(7, 8)]
    [of_parts] = client.post("/v1/infill", json={"parts": parts, **sampling}).json()["choices"]
    assert of_parts["token_ids"][:5] + of_parts["token_ids"][7:] == [*PROMPT, 7, 8]


def test_a_suffix_stands_behind_the_answer(client: TestClient, llm: LLM):
    [expected] = llm.infill(token_ids=[[*PROMPT, *[509] * 4, 7]], sampling=SamplingParams(block_length=4))
    body = {"prompt": PROMPT, "suffix": "w7", "max_tokens": 4, "block_length": 4}
    [choice] = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == f" {words(*expected.token_ids[5:9])}"


def test_scores_are_the_library_s(client: TestClient, llm: LLM):
    asked: dict[str, Any] = {"mc_num": 4, "batch_size": 2, "seed": 3, "block_length": 4}
    answers = [[7, 8, 9], [300]]
    found = client.post("/v1/score", json={"prompt": PROMPT, "answers": answers, **asked}).json()
    expected = llm.likelihoods([(PROMPT, answer) for answer in answers], **asked)
    for told, one, count in zip(found["scores"], expected, (4, 1), strict=True):
        assert told["log_likelihood"] == pytest.approx(one.log_likelihood, rel=1e-5)
        assert told["standard_error"] == pytest.approx(one.standard_error, rel=1e-3)
        assert told["mc_num"] == one.mc_num == count
    refused = client.post("/v1/score", json={"prompt": "", "answers": answers})
    assert (refused.status_code, "the prompt is empty" in refused.text) == (400, True)


@pytest.fixture(scope="module")
def editing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A server of a model whose tokens are edited."""
    directory = write_speaking(tmp_path_factory.mktemp("editing"), "llada2", "none")
    sizes = {"max_num_batched_tokens": BUDGET, "kv_pool": KV_POOL}
    with (
        LLM(directory, dtype="float32", hf_overrides={"mask_token_id": 511}, **sizes) as llm,
        served(llm) as client,
    ):
        yield client


EDITED = {
    "prompt": PROMPT,
    "max_tokens": 20,
    "block_length": 8,
    "transfer": "dynamic",
    "threshold": 0.5,
    "editing_threshold": 0.0,
    "max_post_steps": 6,
    "ignore_eos": True,
}


def test_a_stream_of_edited_text_is_never_taken_back(editing: TestClient):
    """Tokens change that are committed without a gap; whoever reads the text never sees one of them."""
    [choice] = editing.post("/v1/completions", json={**EDITED, "logprobs": 1}).json()["choices"]
    told = events(editing.post("/v1/completions", json={**EDITED, "logprobs": 1, "stream": True}).text)
    parts = [part["choices"][0] for _, part in told]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert len([part for part in parts if part["text"]]) > 1
    for name in ("tokens", "token_logprobs", "committed_in", "text_offset"):
        of_parts = [each for part in parts if part["logprobs"] for each in part["logprobs"][name]]
        assert of_parts == pytest.approx(choice["logprobs"][name]), name


def test_a_stream_of_steps_shows_edits(editing: TestClient):
    body = {**EDITED, "stream": True, "stream_mode": "denoise"}
    told = events(editing.post("/v1/completions", json=body).text)
    [start], [end] = ([part for name, part in told if name == wanted] for wanted in ("start", "end"))
    tokens, changes, settled = dict[int, int](), 0, start["start"]
    for name, part in told:
        if name != "step":
            continue
        for position, token, committed in zip(
            part["positions"], part["token_ids"], part["committed"], strict=True
        ):
            if committed:
                assert position >= settled
                changes += position in tokens
                tokens[position] = token
        settled = max(settled, part["settled"])
    assert changes > 0
    assert [tokens[i] for i in range(start["start"], start["stop"])] == end["token_ids"]
    assert settled >= start["stop"]
