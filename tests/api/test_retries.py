"""A request whose server dies is asked again, unless the client has seen a part of its answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from jdllm.api.retries import ATTEMPTS, Retries
from tests.api.sse import events

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
BODY = [
    {"type": "http.request", "body": b"one, ", "more_body": True},
    {"type": "http.request", "body": b"two", "more_body": False},
]
Attempt = Callable[[Receive, Send], Awaitable[None]]


def head(kind: str) -> Message:
    headers = [(b"content-type", kind.encode()), (b"x-request-id", b"a"), (b"x-request-id", b"a")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def body(text: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


async def dies(receive: Receive, send: Send) -> None:
    await receive()


async def dies_behind_the_head(receive: Receive, send: Send) -> None:
    await send(head("application/json"))


async def repeats(receive: Receive, send: Send) -> None:
    """Answers with the body of the request."""
    got = [await receive() for _ in BODY]
    await send(head("application/json"))
    await send(body(b"".join(message["body"] for message in got), more=False))


def breaks_off(kind: str, text: bytes) -> Attempt:
    async def attempt(receive: Receive, send: Send) -> None:
        await send(head(kind))
        await send(body(text, more=True))

    return attempt


def ask(*attempts: Attempt, received: list[Message] | None = None) -> tuple[list[Message], int]:
    """What a client is sent, and how many servers it takes, where the n-th one behaves as `attempts[n]`."""
    sent: list[Message] = []
    left, messages = list(attempts), list(BODY if received is None else received)
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"] == SCOPE["path"]
        scope["path"] = "changed by the app"
        scopes.append(scope)
        await left.pop(0)(receive, send)

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(Retries(app)(dict(SCOPE), receive, send))
    return sent, len(scopes)


def test_an_answer_passes():
    sent, servers = ask(repeats, repeats)
    assert servers == 1
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["headers"] == [(b"content-type", b"application/json"), (b"x-request-id", b"a")]
    assert sent[1]["body"] == b"one, two"


def test_the_whole_request_is_asked_again_where_nothing_was_sent():
    for first in (dies, dies_behind_the_head):
        sent, servers = ask(first, repeats)
        assert servers == 2
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        assert sent[1]["body"] == b"one, two"


def test_a_request_does_not_end_all_servers():
    sent, servers = ask(*[dies_behind_the_head] * 10)
    assert servers == ATTEMPTS
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "server_died"


def test_a_stream_that_breaks_off_ends_with_an_error():
    begun = b'data: {"n": 1}\n\n'
    sent, servers = ask(breaks_off("text/event-stream; charset=utf-8", begun), repeats)
    assert servers == 1
    assert (sent[0]["status"], sent[-1]["more_body"]) == (200, False)
    text = b"".join(message["body"] for message in sent[1:]).decode()
    (_, first), (_, last) = events(text)
    assert first == {"n": 1}
    assert (last["error"]["code"], last["error"]["type"]) == ("server_died", "server_error")


def test_another_answer_that_breaks_off_has_no_end():
    """The client's connection is then closed, and tells it so."""
    sent, servers = ask(breaks_off("text/html", b"<html>"), repeats)
    assert servers == 1
    assert [message.get("more_body") for message in sent] == [None, True]


def test_nobody_is_asked_for_a_client_that_has_gone():
    sent, servers = ask(dies, repeats, received=[{"type": "http.disconnect"}])
    assert (sent, servers) == ([], 1)


def test_what_is_no_request_passes():
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def nothing(*_: Message) -> Any:
        raise AssertionError("nobody sends or receives")

    asyncio.run(Retries(app)({"type": "websocket"}, nothing, nothing))
    assert seen == ["websocket"]
