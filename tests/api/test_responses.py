"""OpenAI's Responses API, by its JSON; tests/clients asks it with OpenAI's own package."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM

SUM = "123+456="
FIRST = SamplingParams(max_tokens=16, gen_length=16)


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses", json={"input": SUM, "max_output_tokens": 16} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    """The data of all events, whose names are their types."""
    answer = client.post("/v1/responses", json={"input": SUM, "max_output_tokens": 16, "stream": True} | body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = (line.partition(": ")[2] for line in block.split("\n"))
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    assert [told["sequence_number"] for told in found] == list(range(len(found)))
    return found


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_response_is_what_the_library_says(client: TestClient, demo: LLM):
    (expected,) = demo.chat(SUM, FIRST)
    answer = ask(client, model="also", metadata={"a": "b"})
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": expected.text, "annotations": [], "logprobs": []}
    ]
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "also")
    assert (answer["error"], answer["incomplete_details"], answer["metadata"]) == (None, None, {"a": "b"})
    read, made = len(expected.prompt_token_ids), len(expected.token_ids)
    assert answer["usage"] == {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + made,
        "forward_evaluations": expected.nfe,
    }


@pytest.mark.slow
def test_messages_instructions_and_answers_of_ours_are_a_conversation(client: TestClient, demo: LLM):
    first = ask(client, input="1+1=")["output"]
    text = first[0]["content"][0]["text"]
    conversation = [
        message("system", "add"),
        message("user", "1+1="),
        message("assistant", text),
        message("user", SUM),
    ]
    (expected,) = demo.chat([conversation], FIRST)
    parts = [{"type": "input_text", "text": SUM}]
    asked = [message("user", "1+1="), *first, {"type": "message"} | message("user", parts)]
    answer = ask(client, input=asked, instructions="add")
    assert answer["output"][0]["content"][0]["text"] == expected.text
    assert answer["usage"]["input_tokens"] == len(expected.prompt_token_ids)
    assert answer["instructions"] == "add"


@pytest.mark.slow
def test_sampling_parameters_have_their_usual_names(client: TestClient):
    options = {"temperature": 2.0, "top_p": 0.9, "seed": 5, "ignore_eos": True}
    answer = ask(client, **options)
    asked = {"messages": [message("user", SUM)], "max_tokens": 16} | options
    chat = client.post("/v1/chat/completions", json=asked).json()
    assert answer["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (answer["temperature"], answer["top_p"], answer["seed"]) == (2.0, 0.9, 5)


def test_an_answer_that_is_cut_is_incomplete(client: TestClient):
    answer = ask(client, max_output_tokens=2)
    assert (answer["status"], answer["output"][0]["status"]) == ("incomplete", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (answer["usage"]["output_tokens"], answer["max_output_tokens"]) == (2, 2)
    assert events(client, max_output_tokens=2)[-1]["type"] == "response.incomplete"


@pytest.mark.slow
def test_nothing_is_stored_whatever_was_asked(client: TestClient):
    for store in (True, False, None):
        answer = ask(client, store=store)
        assert answer["store"] is False
    assert client.get(f"/v1/responses/{answer['id']}").status_code == 404


def test_a_stream_is_the_answer_in_parts(client: TestClient):
    whole = ask(client, block_length=4)
    told = events(client, block_length=4)
    deltas = [data for data in told if data["type"] == "response.output_text.delta"]
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(data["delta"] for data in deltas) == text
    assert [data["type"].removeprefix("response.") for data in told if data not in deltas] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    created, last = told[0]["response"], told[-1]["response"]
    assert (created["status"], created["output"], created["id"]) == ("in_progress", [], last["id"])
    [item] = last["output"]
    assert all(data["item_id"] == item["id"] for data in deltas)
    changing = {"id", "created_at", "seed", "output"}
    assert {k: v for k, v in last.items() if k not in changing} == {
        k: v for k, v in whole.items() if k not in changing
    }
    assert item["content"] == whole["output"][0]["content"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [message("wizard", "x")]}, "input"),
        ({"input": [message("user", [{"type": "input_image", "image_url": "x"}])]}, "input"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"n": 2}, "n"),
        ({"stream": True, "stream_mode": "denoise"}, "stream_mode"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_a_mistake_names_its_field(client: TestClient, extra: dict[str, Any], param: str):
    answer = client.post("/v1/responses", json={"input": SUM, "max_output_tokens": 8} | extra)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
