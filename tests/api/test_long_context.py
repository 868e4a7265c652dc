"""A context beside a prompt: what the library answers, over HTTP."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from jdllm.decoding.prefilling import Prefilling
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.prompts import LongPrompt
from tests.api.sse import events

CONTEXT = "".join(f"a{letter}={index:03d};" for index, letter in enumerate("bcdefghijklmnopqrst"))
CUT = {"chunk_length": 32, "chunks_kept": 2, "score": "query"}
SHORT = {"max_tokens": 8, "seed": 0, "temperature": 0}
SAMPLING = SamplingParams(max_tokens=8, gen_length=8, prefilling=Prefilling(**CUT))


def ask(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=SHORT | {"prefilling": CUT} | body)
    assert answer.status_code == 200, answer.text
    return answer


def refused(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=SHORT | body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.slow
def test_a_completion_over_a_context(client: TestClient, demo: LLM):
    (expected,) = demo.generate(LongPrompt(context=CONTEXT, query="get ac="), SAMPLING)
    assert expected.prefilling is not None
    answer = ask(client, "/v1/completions", prompt="get ac=", context=CONTEXT).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == (expected.text, expected.token_ids)
    told = choice["prefilling"]
    assert told["selected"] == expected.prefilling.selected
    assert told["scores"] == pytest.approx(expected.prefilling.scores)
    assert told["spans"] == [list(span) for span in expected.prefilling.spans]
    assert [CONTEXT[a:b] for a, b in told["passages"]] == [CONTEXT[a:b] for a, b in told["spans"]]
    assert set(told["seconds"]) == {"draft", "score", "retain", "build"}
    assert answer["usage"]["prompt_tokens"] == len(CONTEXT) + len("get ac=")


@pytest.mark.slow
def test_several_prompts_share_a_context(client: TestClient, demo: LLM):
    asked = ["get ac=", "get ad="]
    expected = demo.generate([LongPrompt(context=CONTEXT, query=query) for query in asked], SAMPLING)
    answer = ask(client, "/v1/completions", prompt=asked, context=CONTEXT).json()
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in expected]


@pytest.mark.slow
def test_a_conversation_over_a_context(client: TestClient, demo: LLM):
    messages = [{"role": "user", "content": "get ac="}]
    (expected,) = demo.chat(messages, SAMPLING, context=CONTEXT)
    answer = ask(client, "/v1/chat/completions", messages=messages, context=CONTEXT).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == expected.text
    assert expected.prefilling is not None
    assert choice["prefilling"]["selected"] == expected.prefilling.selected


@pytest.mark.parametrize("mode", ["text", "denoise"])
@pytest.mark.slow
def test_streams_end_with_the_same_text(client: TestClient, demo: LLM, mode: str):
    (expected,) = demo.generate(LongPrompt(context=CONTEXT, query="get ac="), SAMPLING)
    body = {"prompt": "get ac=", "context": CONTEXT, "stream": True, "stream_mode": mode}
    told = [data for _, data in events(ask(client, "/v1/completions", **body).text)]
    if mode == "text":
        assert "".join(part["choices"][0]["text"] for part in told) == expected.text
    else:
        assert told[-1]["text"] == expected.text
        assert told[-1]["prefilling"]["selected"] == expected.outputs[0].prefilling.selected  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "x", "context": CONTEXT}, "name a preset"),
        ({"prompt": "x", "prefilling": "dream"}, "give a LongPrompt"),
        ({"prompt": "x", "prefilling": "drem", "context": CONTEXT}, "one of 'dream'"),
        ({"prompt": "x", "prefilling": {"chunk_length": 1}, "context": CONTEXT}, "chunk_length is 1"),
        (
            {"prompt": "x", "prefilling": {"chunk_bos": False, "bos_id": 5}, "context": CONTEXT},
            "no chunk begins with it",
        ),
        ({"prompt": "x", "prefilling": {"preset": "x"}, "context": CONTEXT}, "one of 'dream'"),
        (
            {"prompt": "x", "prefilling": "dream", "context": CONTEXT, "cache": "dual"},
            "leave cache at 'none'",
        ),
        (
            {"prompt": "x", "prefilling": "dream", "context": CONTEXT, "suffix": "y"},
            "neither suffix nor echo",
        ),
        ({"prompt": "x", "instruction": "y"}, "there is none"),
        ({"prompt": "x", "prefilling": "dream", "context": []}, "context"),
    ],
)
def test_what_cannot_be_is_refused(client: TestClient, body: dict[str, Any], words: str):
    assert words in refused(client, "/v1/completions", **body)["message"]
