"""Requests made from the OpenAPI document, right ones and wrong ones."""

from typing import Any

import openai  # pyright: ignore[reportMissingImports]
import pytest
import schemathesis  # pyright: ignore[reportMissingImports]
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode  # pyright: ignore[reportMissingImports]
from schemathesis.checks import not_a_server_error  # pyright: ignore[reportMissingImports]
from schemathesis.specs.openapi.checks import (  # pyright: ignore[reportMissingImports]
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.clients.servers import Server

pytestmark = pytest.mark.clients

OPERATIONS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/infill"),
    ("POST", "/v1/score"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/tokenizer_info"),
    ("GET", "/server_info"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/stats"),
    ("GET", "/v1/requests"),
    ("DELETE", "/v1/requests/{call}"),
)
# Only a body can be wrong: every text is a name.
ASKED = [(*one, GenerationMode.POSITIVE) for one in OPERATIONS]
ASKED += [(*one, GenerationMode.NEGATIVE) for one in OPERATIONS if one[0] == "POST"]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "gen_length", "steps")
MOST = {"n": 2, "mc_num": 4} | dict.fromkeys(LENGTHS, 8)
"""So that what is asked for does not take long."""

TYPES = {
    "/v1/completions": openai.types.Completion,
    "/v1/chat/completions": openai.types.chat.ChatCompletion,
    "/v1/responses": openai.types.responses.Response,
    "/v1/models/{name}": openai.types.Model,
}
"""OpenAI's own declarations of the answers."""

TRIES = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
)


@pytest.fixture(scope="module")
def api(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def short(case: Any) -> Any:
    """The case with small numbers of what takes long."""
    if isinstance(case.body, dict):
        asked = {name: case.body[name] for name in MOST if type(case.body.get(name)) is int}
        case.body = case.body | {name: min(value, MOST[name]) for name, value in asked.items()}
    return case


def test_all_operations_are_asked_here(api: Any):
    found = [operation.ok() for operation in api.get_all_operations()]
    assert {(operation.method.upper(), operation.path) for operation in found} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path", "mode"), ASKED)
def test_answers_are_as_the_document_says(server: Server, api: Any, method: str, path: str, mode: Any):
    operation = api[path][method]

    @TRIES
    @given(operation.as_strategy(generation_mode=mode).map(short))
    def check(case: Any) -> None:
        answer = case.call_and_validate(headers=server.headers, checks=CHECKS, timeout=120)
        declared = TYPES.get(path)
        if answer.status_code == 200 and declared and "json" in answer.headers["content-type"][0]:
            declared.model_validate_json(answer.content)

    check()
