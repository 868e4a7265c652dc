"""Answers of a given form over HTTP: the fields of OpenAI's and vLLM's clients, and mistakes in them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.structured.structure import Structure
from tests.api.sse import events
from tests.api.words_server import served
from tests.conftest import BUDGET, KV_POOL
from tests.structured.writing import SUM, SUMS, write_writing

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}
USER = {"role": "user", "content": "An answer?"}
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 60}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = write_writing(tmp_path_factory.mktemp("writing"), "llama")
    with LLM(directory, dtype="float32", max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
        yield llm


@pytest.fixture(scope="module")
def writer(llm: LLM) -> Iterator[TestClient]:
    with served(llm) as client:
        yield client


def is_answer(text: str) -> bool:
    """Whether a text is an object of `SCHEMA`."""
    found = json.loads(text)
    return found.keys() == {"ok", "n"} and isinstance(found["ok"], bool) and found["n"] in range(100)


ASKED: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, is_answer),
    "structured_outputs": ({"structured_outputs": {"json": SCHEMA}}, is_answer),
    "regex": ({"structured_outputs": {"regex": "[ab]{3}", "json": None}}, re.compile("[ab]{3}").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
    "grammar": ({"structured_outputs": {"grammar": SUMS}}, SUM.fullmatch),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, is_answer),
    "guided_regex": ({"guided_regex": "[0-9]{2}"}, str.isdigit),
    "guided_choice": ({"guided_choice": ["abc", "é"]}, ("abc", "é").__contains__),
    "guided_grammar": ({"guided_grammar": SUMS}, SUM.fullmatch),
    "structure": ({"structure": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_form_by_each_name(writer: TestClient, case: str):
    asked, holds = ASKED[case]
    answers = [
        writer.post("/v1/completions", json={"prompt": "a", **DRAWN, **asked}).json(),
        writer.post("/v1/chat/completions", json={"messages": [USER], **DRAWN, **asked}).json(),
    ]
    texts = [answers[0]["choices"][0]["text"], answers[1]["choices"][0]["message"]["content"]]
    for answer, text in zip(answers, texts, strict=True):
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "ignored_fields" not in answer
        assert holds(text)


def test_as_the_library(writer: TestClient, llm: LLM):
    body = {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": NAMED}, **DRAWN}
    [expected] = llm.generate("a", SamplingParams(structure=Structure(json_schema=SCHEMA), **DRAWN))
    assert writer.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] == expected.token_ids
    chunks = events(writer.post("/v1/completions", json=body | {"stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for _, chunk in chunks) == expected.text


def test_any_object(writer: TestClient):
    """What is cut is the beginning of an object."""
    body = {"messages": [USER], "response_format": {"type": "json_object"}, **DRAWN}
    choice = writer.post("/v1/chat/completions", json=body).json()["choices"][0]
    text = choice["message"]["content"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":
        json.loads(text)


def test_a_response(writer: TestClient):
    format = {"type": "json_schema", **NAMED}
    body = {"input": "An answer?", "text": {"format": format}, "temperature": 1.0, "seed": 5}
    answer = writer.post("/v1/responses", json=body | {"max_output_tokens": 60}).json()
    assert answer["status"] == "completed"
    assert answer["text"]["format"] == format
    assert is_answer(answer["output"][0]["content"][0]["text"])
    for other in ({"type": "text"}, {"type": "json_object"}):
        told = writer.post("/v1/responses", json={"input": "a", "text": {"format": other}, "max_tokens": 2})
        assert told.json()["text"]["format"] == other


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "keyword": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format",
        'response_format has a json_schema that uses "not", which is not supported',
    ),
    "expression": ({"guided_regex": "("}, "guided_regex", "guided_regex has a regex that cannot be used"),
    "grammar": ({"guided_grammar": "start: x"}, "guided_grammar", 'unknown name: "x"'),
    "two": (
        {"guided_regex": "a", "guided_choice": ["b"]},
        "guided_regex",
        "guided_regex and guided_choice say what form the answer has: give one of them",
    ),
    "two names": (
        {"structure": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "response_format",
        "give one of them",
    ),
    "two of one": (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "structured_outputs has regex and choice, expected one of",
    ),
    "nothing": ({"structured_outputs": {}}, "structured_outputs", "structured_outputs has nothing"),
    "unknown": ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "Extra inputs"),
    "unknown type": ({"response_format": {"type": "xml"}}, "response_format", "response_format is"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
    "empty choice": ({"guided_choice": []}, "guided_choice", "guided_choice has a wrong field: choice is ()"),
    "stop": (
        {"guided_choice": ["a"], "stop": ["b"]},
        "guided_choice",
        "guided_choice does not go with stop: the structure says where the text ends",
    ),
    "structure": ({"structure": {"regex": "("}}, "structure", "structure has a regex that cannot be used"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_names_its_field(writer: TestClient, case: str):
    asked, param, message = WRONG[case]
    for route, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [USER]})):
        answer = writer.post(f"/v1/{route}", json=body | asked)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert message in error["message"]
        assert len(error["message"].splitlines()) == 1
        assert error["param"] == param


def test_a_model_that_denoises(client: TestClient):
    """The server's own defaults have no effect on the order of tokens."""
    format = {"type": "json_schema", "json_schema": NAMED}
    body = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 48, "response_format": format}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert is_answer(choice["message"]["content"])


def test_what_stands_between_two_texts_has_no_form(client: TestClient):
    body = {"prompt": "1+1=", "suffix": "!", "max_tokens": 8, "response_format": {"type": "json_object"}}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert answer.json()["error"]["message"].startswith("response_format is for answers, ")


def test_scores_have_no_form(client: TestClient):
    body = {"prompt": "1+1=", "answers": ["2"], "structure": {"choice": ["2"]}}
    answer = client.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structure"
