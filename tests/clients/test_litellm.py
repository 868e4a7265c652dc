"""litellm, as one of the packages that speak OpenAI's API their own way."""

import asyncio
import os
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices come from the package, not from a host
import litellm  # pyright: ignore[reportMissingImports]

from tests.clients.servers import MODEL, ROWS, Server

pytestmark = [
    pytest.mark.clients,
    # Of its own declarations, and of its own use of pydantic.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

MESSAGES = [{"role": "user", "content": "12+30="}]


@pytest.fixture(scope="module")
def where(server: Server) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": server.api_key,
        "max_tokens": 8,
        "temperature": 0,
        "num_retries": 0,
    }


def test_a_chat(where: dict[str, Any]):
    answer = litellm.completion(**where, messages=MESSAGES)
    assert answer.choices[0].message.content == "42"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("42") + 1


def test_a_stream(where: dict[str, Any]):
    options = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**where, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "42"
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == len("42") + 1


def test_a_text_completion(where: dict[str, Any]):
    options = where | {"model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(**options, prompt=["123+456=", "1+1="])
    assert [choice.text for choice in answer.choices] == ["579", "2"]


def test_many_at_a_time(where: dict[str, Any]):
    async def ask(i: int) -> str:
        messages = [{"role": "user", "content": f"{i}+{i}="}]
        answer = await litellm.acompletion(**where, messages=messages)
        return answer.choices[0].message.content

    async def all() -> list[str]:
        return await asyncio.gather(*(ask(i) for i in range(10, 18)))

    assert asyncio.run(all()) == [str(2 * i) for i in range(10, 18)]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"extra_body": {"n": 0}}, litellm.BadRequestError),
        ({"max_tokens": ROWS}, litellm.BadRequestError),
        ({"model": "openai/other"}, litellm.NotFoundError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
    ],
)
def test_errors_are_what_they_are(where: dict[str, Any], fields: dict[str, Any], error: type[Exception]):
    with pytest.raises(error):
        litellm.completion(**where | {"messages": MESSAGES} | fields)
