"""What clients send beside what they mean: null, habits, names that nobody knows."""

import dataclasses
import logging
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from jdllm.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    InfillRequest,
    ScoreRequest,
    StreamOptions,
    TokenizeRequest,
)
from jdllm.api.responses_protocol import ResponsesRequest
from jdllm.api.service import Service
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.api.sse import events

USER = {"role": "user", "content": "12+30="}
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "12+30=", "max_tokens": 4}),
    "/v1/chat/completions": (ChatRequest, {"messages": [USER], "max_tokens": 4}),
    "/v1/responses": (ResponsesRequest, {"input": "12+30=", "max_output_tokens": 4}),
    "/v1/infill": (InfillRequest, {"parts": ["1+1=", {"type": "text", "max_tokens": 2}]}),
    "/v1/score": (ScoreRequest, {"prompt": "1+1=", "answers": ["2"], "mc_num": 1, "batch_size": 1}),
    "/tokenize": (TokenizeRequest, {"prompt": "1+1="}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
SAID = ("id", "created", "created_at", "seed", "seeds", "output")
"""Fields of answers that differ from call to call, or hold ids that do."""


def post(client: TestClient, route: str, **body: Any) -> dict[str, Any]:
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in SAID}


def refused(client: TestClient, route: str, **body: Any) -> dict[str, Any]:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("route", ROUTES)
def test_null_is_as_good_as_nothing(client: TestClient, route: str):
    declared, body = ROUTES[route]
    nothing = dict.fromkeys(declared.model_fields)
    assert post(client, route, **(nothing | body)) == post(client, route, **body)


def test_null_in_inner_fields_is_as_good_as_nothing(client: TestClient):
    chat, part = "/v1/chat/completions", {"type": "text", "text": USER["content"], "cache_control": None}
    message = {"role": "user", "content": [part | {"refusal": None}], "name": None, "tool_calls": None}
    options = {"stream_options": dict.fromkeys(StreamOptions.model_fields), "response_format": None}
    plain = post(client, chat, messages=[USER], max_tokens=4)
    assert post(client, chat, messages=[message], max_tokens=4, **options) == plain


def test_a_required_field_of_null_is_missing(client: TestClient):
    error = refused(client, "/v1/completions", prompt=None)
    assert (error["message"], error["param"], error["code"]) == (
        "prompt is missing",
        "prompt",
        "missing_field",
    )
    assert refused(client, "/v1/chat/completions", messages=[USER, {"role": "user", "content": None}])[
        "message"
    ] == ("messages[1].content is missing")


HABITS: list[dict[str, Any]] = [
    {"temperature": 0, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    {"top_p": 0.5},
    {"top_k": -1, "min_p": 0.0, "top_p": 1},
    {"top_k": 0, "seed": -1},
    {"min_tokens": 0, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0},
    {"parallel_tool_calls": True, "reasoning_effort": "low", "verbosity": "high", "service_tier": "flex"},
    {"skip_special_tokens": True, "spaces_between_special_tokens": False},
    {"cache_control": {"type": "ephemeral"}, "prompt_cache_retention": "24h", "metadata": {"a": None}},
    {"tool_choice": "auto", "tools": [], "functions": [], "function_call": "none"},
    {"tool_choice": "none", "logit_bias": {}, "store": True, "user": "me", "n": 1},
    {"logit_bias": {"5": 0, "17": 0.0}},
    {"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True},
    {"stream_reasoning": True, "include_reasoning": True},
]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: next(iter(habit)))
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_values_that_change_nothing_are_accepted(client: TestClient, route: str, habit: dict[str, Any]):
    body = ROUTES[route][1]
    assert post(client, route, **body, **habit) == post(client, route, **body)


@pytest.mark.slow
def test_a_length_of_minus_one_is_the_servers(client: TestClient, service: Service):
    for field in ({}, {"max_tokens": -1}, {"max_tokens": None, "max_completion_tokens": -1}):
        answer = post(client, "/v1/chat/completions", messages=[USER], ignore_eos=True, **field)
        assert answer["usage"]["completion_tokens"] == service.settings.default_sampling.gen_length
    both = {"max_tokens": 3, "max_completion_tokens": 3, "ignore_eos": True}
    answer = post(client, "/v1/chat/completions", messages=[USER], **both)
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.slow
def test_a_filter_takes_the_temperature_of_the_server(
    client: TestClient, demo: LLM, service: Service, monkeypatch: pytest.MonkeyPatch
):
    asked = {"max_tokens": 8, "top_p": 0.6, "seed": 3}
    for temperature in (0.0, 2.5):
        sampling = SamplingParams(max_tokens=8, top_p=0.6, seed=3, temperature=temperature)
        (expected,) = demo.generate("12+30=", sampling)
        default = service.settings.default_sampling.changed(temperature=temperature)
        settings = dataclasses.replace(service.settings, default_sampling=default)
        monkeypatch.setattr(service, "settings", settings)
        answer = post(client, "/v1/completions", prompt="12+30=", **asked)
        assert answer["choices"][0]["token_ids"] == expected.token_ids


@pytest.mark.parametrize(
    ("route", "extra"),
    [
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"stream_mode": "denoise"}),
        ("/v1/responses", {}),
        ("/v1/infill", {}),
        ("/v1/infill", {"parts": ["1+1=", {"type": "choice", "options": ["2", "3"]}]}),
    ],
)
def test_no_stream_is_held_back_by_proxies(client: TestClient, route: str, extra: dict[str, Any]):
    answer = client.post(route, json=ROUTES[route][1] | {"stream": True} | extra)
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"skip_special_tokens": False}, "skip_special_tokens is False: expected True: texts are without"),
        (
            {"tool_choice": "required"},
            "tool_choice is 'required': expected 'auto' or 'none': there are no tools",
        ),
        ({"no_stop_trim": True}, "no_stop_trim is True: expected False: a text ends before"),
        ({"return_hidden_states": True}, "return_hidden_states is True: expected False: no hidden states"),
        ({"tools": [{"type": "function"}]}, "tools is [{'type': 'function'}]: expected nothing: no tools"),
        ({"tools": {"strict": 0}}, "tools is {'strict': 0}: expected nothing: no tools"),
        ({"threshold": 0.5}, "threshold has no effect here"),
        ({"seed": -2}, "seed is -2: Input should be greater"),
    ],
)
def test_values_that_would_change_something_are_refused(client: TestClient, field: dict, reason: str):
    error = refused(client, "/v1/completions", prompt="1+1=", max_tokens=4, **field)
    assert error["message"].startswith(reason)
    assert error["param"] == next(iter(field))


@pytest.mark.parametrize("route", ROUTES)
def test_names_that_nobody_knows_are_passed_over_and_told(client: TestClient, route: str):
    body = ROUTES[route][1]
    answer = post(client, route, **body, guided_whatever=1, banana={"a": 1}, nobody=None)
    assert answer.pop("ignored_fields") == ["guided_whatever", "banana"]
    assert answer == post(client, route, **body)


def test_names_inside_of_fields_have_their_path(client: TestClient):
    body = {"prompt": "1+1=", "max_tokens": 2, "stream_options": {"apples": 1}, "pears": 2}
    assert post(client, "/v1/completions", **body)["ignored_fields"] == ["pears", "stream_options.apples"]


def test_the_first_event_of_a_stream_tells_them(client: TestClient):
    body = ROUTES["/v1/chat/completions"][1] | {"stream": True, "banana": 1}
    first, *rest = events(client.post("/v1/chat/completions", json=body).text)
    assert first[1]["ignored_fields"] == ["banana"]
    assert not any("ignored_fields" in data for _, data in rest)
    steps = events(client.post("/v1/chat/completions", json=body | {"stream_mode": "denoise"}).text)
    assert steps[0][1]["ignored_fields"] == ["banana"]


def test_the_log_tells_each_name_once(client: TestClient, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "jdllm.api"):
        for name in ("told_once", "told_once", "told_too\n"):
            post(client, "/tokenize", prompt="1", **{name: 1})
    told = [record.getMessage() for record in caplog.records]
    assert [message.split()[4] for message in told] == ["told_once,", "told_too\\n,"]


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ({"max_token": 4}, "max_tokens"),
        ({"temprature": 1}, "temperature"),
        ({"strem": True}, "stream"),
        ({"stream_options": {"include_usge": True}}, "include_usage"),
    ],
)
def test_a_misspelt_name_is_refused(client: TestClient, field: dict[str, Any], meant: str):
    error = refused(client, "/v1/completions", prompt="1+1=", **field)
    assert error["message"].endswith(f": did you mean {meant}?")
    assert (error["param"], error["code"]) == (next(iter(field)), "unknown_field")


@pytest.fixture
def strict(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(service.settings, strict_fields=True)
    monkeypatch.setattr(service, "settings", settings)


@pytest.mark.parametrize("route", ROUTES)
def test_strict_fields_refuse_every_name_that_nobody_knows(client: TestClient, strict: None, route: str):
    error = refused(client, route, **ROUTES[route][1], banana=1)
    assert (error["message"], error["code"]) == ("there is no field banana", "unknown_field")
    post(client, route, **ROUTES[route][1])


@pytest.mark.parametrize(
    ("route", "body", "begins"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "user", "content": 5}]},
            "messages[1].content is 5: ",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "wizard", "content": ""}]},
            "messages[0].role is 'wizard': ",
        ),
        ("/v1/chat/completions", {"messages": [{"content": ""}]}, "messages[0].role is missing"),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    USER,
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
                ]
            },
            "messages[1].content[1].type is 'image': ",
        ),
        ("/v1/completions", {"prompt": ["a", "b", 5]}, "prompt[2] is 5: "),
        ("/v1/completions", {"prompt": [1, 2, -5]}, "prompt[2] is -5: "),
        ("/v1/completions", {"prompt": [[1], [2, "x"]]}, "prompt[1][1] is 'x': "),
        ("/v1/completions", {"prompt": "a", "stop": ["x", 5]}, "stop[1] is 5: "),
        (
            "/v1/completions",
            {"prompt": "a", "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        (
            "/v1/infill",
            {"parts": ["a", {"type": "choice", "options": ["b", 3]}]},
            "parts[1].options[1] is 3: ",
        ),
        ("/v1/score", {"prompt": "a", "answers": ["b", 7]}, "answers[1] is 7: "),
    ],
)
def test_errors_name_the_path(client: TestClient, route: str, body: dict[str, Any], begins: str):
    error = refused(client, route, **body)
    assert error["message"].startswith(begins), error
    assert error["param"] == begins.partition("[")[0].partition(".")[0]
