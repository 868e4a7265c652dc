"""The `openai` package against a real server."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any, Literal

import openai  # pyright: ignore[reportMissingImports]
import pydantic
import pytest

from tests.clients.servers import LONG, MODEL, ROWS, Server, Starter

pytestmark = pytest.mark.clients

PROMPT, SUM = "123+456=", "579"
END_ID = 257
"""Of the bundled model's end of text, which its answers end with."""

QUEUE = 16
SECONDS = 4.0


def open_client(server: Server, **options) -> openai.OpenAI:
    settings = {"base_url": f"{server.url}/v1", "api_key": server.api_key or "any", "max_retries": 0}
    return openai.OpenAI(**settings | options)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with open_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def narrow(start_server: Starter) -> Server:
    """A server where few requests may wait, and none may take long."""
    return start_server("--max-queue", str(QUEUE), "--request-timeout", str(SECONDS)).ready()


def test_a_completion(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (SUM, "stop", 0)
    assert choice.token_ids == [*SUM.encode(), END_ID]
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(SUM) + 1
    assert answer.usage.total_tokens == len(PROMPT) + len(SUM) + 1
    assert (answer.object, answer.model) == ("text_completion", MODEL)


def test_several_prompts_and_samples(client: openai.OpenAI):
    prompts = ["1+1=", "20+30="]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=8, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["2", "2", "50", "50"]
    ids = [list(prompt.encode()) for prompt in prompts]
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=8, temperature=0)
    assert [choice.text for choice in answer.choices] == ["2", "50"]


def test_a_chat(client: openai.OpenAI):
    messages = [{"role": "user", "content": [{"type": "text", "text": "12+30="}]}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "42")
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len("42") + 1


def test_a_seed_says_which_samples(client: openai.OpenAI):
    def samples(seed: int) -> list[list[int]]:
        answer = client.completions.create(
            model=MODEL,
            prompt="what is this",
            max_tokens=16,
            temperature=3,
            n=3,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return [choice.token_ids for choice in answer.choices]

    first = samples(5)
    assert samples(5) == first
    assert first[0] != first[1] != first[2]
    assert samples(6) != first


@pytest.mark.parametrize("stop", ["7", ["x", "79"]])
def test_stop(client: openai.OpenAI, stop):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0, stop=stop)
    assert answer.choices[0].text == "5"
    assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1)
    found = answer.choices[0].logprobs
    assert found.tokens == [*SUM, "<|endoftext|>"]
    assert found.text_offset == [0, 1, 2, 3]
    assert all(0.5 < math.exp(logprob) <= 1 for logprob in found.token_logprobs)
    assert [list(top) for top in found.top_logprobs] == [[token] for token in found.tokens]

    messages = [{"role": "user", "content": "12+30="}]
    options = {"model": MODEL, "messages": messages, "max_tokens": 8, "logprobs": True, "top_logprobs": 1}
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert "".join(entry.token for entry in content[:2]) == "42"
    assert all(entry.bytes == list(entry.token.encode()) for entry in content)
    assert all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in content)


def test_a_stream_is_the_whole_answer(client: openai.OpenAI):
    options = {"model": MODEL, "prompt": [PROMPT, "7+8="], "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    *told, last = chunks
    texts, reasons = ["", ""], [None, None]
    for chunk in told:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert chunk.usage is None
    assert texts == [choice.text for choice in whole.choices] == [SUM, "15"]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert last.choices == []
    assert last.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_in_every_chunk(client: openai.OpenAI):
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == len(SUM) + 1


def test_a_stream_of_a_chat(client: openai.OpenAI):
    messages = [{"role": "user", "content": "12+30="}]
    with client.chat.completions.stream(model=MODEL, messages=messages, max_tokens=8) as stream:
        told = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(told) == final.choices[0].message.content == "42"
    assert final.choices[0].finish_reason == "stop"


def test_a_response(client: openai.OpenAI):
    asked = {"model": MODEL, "input": "12+30=", "max_output_tokens": 8, "store": False}
    answer = client.responses.create(**asked)
    assert (answer.output_text, answer.status, answer.store) == ("42", "completed", False)
    assert answer.usage.output_tokens == len("42") + 1
    with client.responses.stream(**asked) as stream:
        told = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(told) == final.output_text == "42"
    assert final.usage == answer.usage


def test_a_response_to_a_conversation_with_an_answer_of_ours(client: openai.OpenAI):
    first = client.responses.create(model=MODEL, input="1+1=", max_output_tokens=8)
    conversation = [
        {"role": "user", "content": "1+1="},
        *first.output,
        {"role": "user", "content": [{"type": "input_text", "text": "12+30="}]},
    ]
    second = client.responses.create(
        model=MODEL, instructions="add", input=conversation, max_output_tokens=8, stream=True
    )
    last = list(second)[-1]
    assert last.type in ("response.completed", "response.incomplete")
    chat = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "12+30="},
    ]
    expected = client.chat.completions.create(model=MODEL, messages=chat, max_tokens=8)
    assert last.response.output_text == expected.choices[0].message.content
    assert last.response.usage.input_tokens == expected.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="1+1=", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


async def _sums(server: Server) -> list[str]:
    settings = {"base_url": f"{server.url}/v1", "api_key": server.api_key, "max_retries": 0}
    async with openai.AsyncOpenAI(**settings) as client:

        async def streamed(prompt: str) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=8, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*(streamed(f"{i}+{i}=") for i in range(10, 22)))


def test_many_at_a_time(server: Server):
    assert asyncio.run(_sums(server)) == [str(2 * i) for i in range(10, 22)]


def test_own_fields(client: openai.OpenAI):
    body = {"gen_length": 16, "steps": 4, "block_length": 8, "cache": "dual", "early_stop": False}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, extra_body=body)
    assert answer.choices[0].nfe == answer.usage.forward_evaluations == 4
    assert answer.usage.completion_tokens == 16


def test_raw_responses(client: openai.OpenAI):
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].text == SUM


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == ROWS


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"n": 0}, "n", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"extra_body": {"max_tokns": 1}}, "max_tokns", "unknown_field"),
        ({"extra_body": {"cache": "dual", "cfg_scale": 1.5}}, "cache", None),
        ({"max_tokens": ROWS}, None, "context_length_exceeded"),
    ],
)
def test_bad_requests(client: openai.OpenAI, fields, param, code):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 8} | fields)
    assert caught.value.type == "invalid_request_error"
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"uniqueItems": True}},
            }
        },
    ],
)
def test_what_no_such_model_does_is_named(client: openai.OpenAI, fields):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "1+1="}]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked | fields)
    assert caught.value.param == next(iter(fields))


class Form(pydantic.BaseModel):
    """A form for an answer."""

    digits: Literal[1, 2, 3]
    right: bool


def test_answers_are_parsed(client: openai.OpenAI):
    messages: Any = [{"role": "user", "content": "1+1="}]
    answer = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Form, max_tokens=40, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Form)
    response = client.responses.parse(model=MODEL, input="1+1=", text_format=Form, max_output_tokens=40)
    assert isinstance(response.output_parsed, Form)


def test_what_is_not_there(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt=PROMPT)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="a")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_wrong_key(server: Server):
    wrong, refused = open_client(server, api_key="wrong"), pytest.raises(openai.AuthenticationError)
    with wrong as client, refused as caught:
        client.completions.create(model=MODEL, prompt=PROMPT)
    assert caught.value.code == "invalid_api_key"


def test_a_client_that_waits_no_longer_is_forgotten(server: Server):
    with open_client(server, timeout=1.0) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt=PROMPT, n=32, extra_body=LONG)
    server.settle()


def test_a_stream_that_is_left_is_forgotten(server: Server, client: openai.OpenAI):
    stream = client.completions.create(model=MODEL, prompt=PROMPT, n=8, stream=True, extra_body=LONG)
    assert next(iter(stream)).choices[0].finish_reason is None
    with server.client() as probe:
        assert probe.get("/v1/requests").json()["data"]
        stream.close()
    server.settle()


def test_a_full_queue(narrow: Server):
    with open_client(narrow) as client:
        running = client.completions.create(model=MODEL, prompt=PROMPT, n=QUEUE, stream=True, extra_body=LONG)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt=PROMPT, n=QUEUE, extra_body=LONG)
        running.close()
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) > 0
    narrow.settle()


def test_a_request_that_takes_too_long(narrow: Server):
    with open_client(narrow) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model=MODEL, prompt=PROMPT, n=QUEUE, extra_body=LONG)
        assert (caught.value.status_code, caught.value.code) == (408, "request_timeout")
        narrow.settle()
        stream = client.completions.create(model=MODEL, prompt=PROMPT, n=QUEUE, stream=True, extra_body=LONG)
        with pytest.raises(openai.APIError, match="took longer"):
            list(stream)
    narrow.settle()


def test_an_answer_is_sent_back_as_the_package_has_it(client: openai.OpenAI):
    def ask(messages):
        return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8).choices[0].message

    user = {"role": "user", "content": "12+30="}
    first = ask([user])
    plain = ask([user, {"role": "assistant", "content": first.content}, user])
    for message in (first, first.model_dump(), first.model_dump(exclude_unset=True)):
        assert ask([user, message, user]).content == plain.content
