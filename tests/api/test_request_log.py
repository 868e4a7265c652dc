import asyncio
import dataclasses
import json
import logging

import pytest
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from jdllm.api.app import Access, create_app
from jdllm.api.request_log import RequestLog
from jdllm.api.service import Service
from tests.api.sse import events
from tests.api.undriven import stop_once_asked, undriven

SECRET = "what nobody logs"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "jdllm.api")
    return caplog


def logging_client(service: Service, **settings: bool) -> TestClient:
    told = dataclasses.replace(service.settings, **settings)
    return TestClient(create_app(Service(service.llm, service.engine, told, service.metrics)))


@pytest.mark.parametrize(
    "given", ["mine-1", "A" * 128, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"]
)
def test_an_id_that_is_given_is_returned(client: TestClient, given: str):
    for path in ("/health", "/nowhere", "/", "/v1/models"):
        assert client.get(path, headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "A" * 129, "two words", "<script>", "a\x00b"])
def test_any_other_gets_a_new_one(client: TestClient, given: str | None):
    headers = {} if given is None else {"X-Request-Id": given}
    ids = [client.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert ids[0] != ids[1]
    assert given not in ids
    assert all(id.isalnum() and len(id) == 32 for id in ids)


def test_refused_requests_are_logged_with_their_reason(client: TestClient, log: pytest.LogCaptureFixture):
    headers = {"X-Request-Id": "mine-2"}
    client.post("/v1/completions", json={"prompt": SECRET, "temperature": SECRET}, headers=headers)
    client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 10**5}, headers=headers)
    client.post("/v1/completions", json={"prompt": SECRET, "cache": SECRET}, headers=headers)
    client.get("/v1/no%0Aroute", headers=headers)
    wrong, long, cache, route = log.messages
    assert wrong.startswith("POST /v1/completions 400 invalid_value: temperature")
    assert wrong.endswith("id mine-2")
    assert "longer than the" in long
    assert "400" in cache
    assert "cache" in cache
    assert route.startswith("GET /v1/no\\nroute 404")
    assert SECRET not in log.text


def test_who_is_kept_out_is_logged_too(service: Service, log: pytest.LogCaptureFixture):
    access = Access(api_keys=("right",), allowed_hosts=("testserver",), largest_body=10)
    with TestClient(create_app(service, access)) as client:
        client.get("/v1/models", headers={"Authorization": f"Bearer {SECRET}"})
        client.get("/v1/models", headers={"Host": "a.example"})
        client.post("/tokenize", content=b" " * 11, headers={"Authorization": "Bearer right"})
    codes = ["401 invalid_api_key", "400 host_not_allowed", "413 body_too_large"]
    assert [code in message for code, message in zip(codes, log.messages, strict=True)] == [True] * 3
    assert SECRET not in log.text


def test_answered_requests_are_logged_where_that_is_asked_for(
    client: TestClient, service: Service, log: pytest.LogCaptureFixture
):
    body = {"prompt": "12+3=", "max_tokens": 4, "ignore_eos": True}
    client.post("/v1/completions", json=body)
    assert not log.messages
    with logging_client(service, log_requests=True) as told:
        told.get("/health")
        told.post("/v1/completions", json=body)
        told.post("/v1/completions", json=body | {"stream": True})
    whole, stream = log.messages
    for message in (whole, stream):
        assert message.startswith("POST /v1/completions 200, 5 tokens read, 4 generated")
    assert "12+3" not in log.text


def test_prompts_are_logged_where_that_is_asked_for(service: Service, log: pytest.LogCaptureFixture):
    with logging_client(service, log_prompts=True) as told:
        told.post("/v1/completions", json={"prompt": "12+3=\n", "max_tokens": 4})
        told.post("/v1/completions", json={"prompt": [49, 50], "max_tokens": 4})
        told.post("/v1/completions", json={"prompt": "1", "temperature": SECRET})
    text, ids, refused = log.messages
    assert text.endswith("the prompt '12+3=\\n'")
    assert ids.endswith("the prompt [49, 50]")
    assert SECRET in refused


def _run(inner, cancel: bool) -> list[Message]:
    """What an application answers inside the log; it is cancelled as a loop that ends does."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def main() -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        task = asyncio.ensure_future(RequestLog(inner)(scope, receive, send))
        await asyncio.sleep(0)
        if cancel:
            task.cancel()
        await task

    asyncio.run(main())
    return sent


def test_who_still_waits_when_the_loop_ends_is_told_so():
    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(60)

    start, body = _run(waiting, cancel=True)
    assert start["status"] == 503
    assert json.loads(body["body"])["error"]["code"] == "server_stopping"


def test_what_fails_unforeseen_is_an_error_with_an_id(log: pytest.LogCaptureFixture):
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError(SECRET)

    start, body = _run(failing, cancel=False)
    assert start["status"] == 500
    assert b"x-request-id" in dict(start["headers"])
    assert json.loads(body["body"])["error"]["code"] == "internal_error"
    assert SECRET not in log.messages[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_is_told_of(service: Service, log: pytest.LogCaptureFixture, stream: bool):
    body = json.dumps({"prompt": SECRET, "max_tokens": 1, "stream": stream}).encode()
    headers = [(b"host", b"testserver"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    messages = iter([{"type": "http.request", "body": body}])
    # A stream and its call both wait for the client to go. Here the stream hears first, and ends the call.
    deaf = iter([False, stream])

    async def main(waiting: Service) -> None:
        async def receive() -> Message:
            if message := next(messages, None):
                return message
            if next(deaf, False):
                await asyncio.Event().wait()
            while not waiting.running:
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(_: Message) -> None:
            pass

        await create_app(waiting)(scope | {"query_string": b""}, receive, send)

    with undriven(service) as waiting:
        asyncio.run(main(waiting))
    [message] = log.messages
    assert message.startswith("POST /v1/completions 499 client_gone")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_tells_its_clients(service: Service, path: str, stream: bool):
    body = {"prompt": "1", "messages": [{"role": "user", "content": "1"}], "stream": stream, "max_tokens": 1}
    with undriven(service) as stopped, TestClient(create_app(stopped)) as client:
        assert client.portal is not None
        client.portal.start_task_soon(stop_once_asked, stopped)
        answer = client.post(path, json=body)
    if stream:
        error = events(answer.text)[-1][1]["error"]
    else:
        assert answer.status_code == 503
        error = answer.json()["error"]
    assert error["code"] == "server_stopping"
