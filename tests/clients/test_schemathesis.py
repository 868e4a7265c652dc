"""Requests made from the OpenAPI document, right ones and wrong ones."""

from typing import Any

import openai  # pyright: ignore[reportMissingImports]
import pytest
import schemathesis  # pyright: ignore[reportMissingImports]
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error  # pyright: ignore[reportMissingImports]
from schemathesis.specs.openapi.checks import (  # pyright: ignore[reportMissingImports]
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.clients.servers import Server

pytestmark = pytest.mark.clients

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MOST = {"n": 2, "max_tokens": 8, "max_completion_tokens": 8, "gen_length": 8, "steps": 8, "mc_num": 4}
"""So that what is asked for does not take long."""

TYPES = {
    "/v1/completions": openai.types.Completion,
    "/v1/chat/completions": openai.types.chat.ChatCompletion,
    "/v1/models/{name}": openai.types.Model,
}
"""OpenAI's own declarations of the answers."""


@pytest.fixture(scope="session")
def api(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Keep right requests short."""
    if not isinstance(body, dict):
        return body
    numbers = {name: body[name] for name in MOST if type(body.get(name)) is int}
    return body | {name: min(value, MOST[name]) for name, value in numbers.items()}


@schemathesis.pytest.from_fixture("api").parametrize()
@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_the_document_says(case: Any, server: Server):
    answer = case.call_and_validate(headers=server.headers, checks=CHECKS, timeout=120)
    declared = TYPES.get(case.operation.path)
    if answer.status_code == 200 and declared and "json" in answer.headers["content-type"][0]:
        declared.model_validate_json(answer.content)
