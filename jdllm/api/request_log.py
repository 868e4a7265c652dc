"""What stands around every request: its id, its end whatever happens, and what the log says of it."""

import asyncio
import contextlib
import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdllm.api.errors import ApiError, as_api_error, stopping

_log = logging.getLogger("jdllm.api")

_HEADER = b"x-request-id"
_ID = re.compile(rb"[\w.:/+=@-]{1,128}")
_FAREWELL_SECONDS = 1.0
_SHOWN = 300
_ASKING = ("POST", "DELETE")
"""Methods that are told of when all is well: others are monitoring's and the page's."""

_SAID = {
    "body_too_complex",
    "body_too_large",
    "client_gone",
    "context_length_exceeded",
    "engine_dead",
    "host_not_allowed",
    "invalid_api_key",
    "queue_full",
    "request_cancelled",
    "request_timeout",
    "server_stopping",
    "slow_body",
    "too_many_requests",
}
"""Codes of errors whose messages hold nothing that a client wrote."""


class RequestLog:
    """Gives each request an id, tells of its end, and answers where nobody else does.

    Refused requests are told of with the field and the code of what was wrong, and what a client wrote only
    where that is asked for.

    Arguments:
    - `answered`: whether answered requests are told of too.
    - `prompts`: whether what clients wrote may be told.

    In a request's state are its id (`request_id`), as soon as there is one its `error`, and once its call has
    ended a `CallEnd` (`call`).
    """

    def __init__(self, app: ASGIApp, *, answered: bool = False, prompts: bool = False):
        self._app, self._answered, self._prompts = app, answered, prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, began, status = scope.setdefault("state", {}), time.monotonic(), 0
        state["request_id"] = _id_of(scope)

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (_HEADER, state["request_id"].encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            state["error"] = as_api_error(error)
        except asyncio.CancelledError:  # the event loop ends, which waits for this task
            state["error"] = stopping()
        if not status and (error := state.get("error")):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(error.response()(scope, receive, named), _FAREWELL_SECONDS)
        self._tell(scope, status, time.monotonic() - began)

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        state = scope["state"]
        error: ApiError | None = state.get("error")
        if error is None and not (self._answered and scope["method"] in _ASKING):
            return
        what = f"{scope['method']} {_printable(scope['path'])} {error.status if error else status}"
        if error is not None:
            what += f" {reason(error, self._prompts)}"
        elif call := state.get("call"):
            what += f", {call.prompt_tokens} tokens read, {call.completion_tokens} generated"
        client = scope["client"][0] if scope.get("client") else "-"
        _log.info("%s, %.3f s, from %s, id %s", what, seconds, client, state["request_id"])


def reason(error: ApiError, prompts: bool) -> str:
    """What was wrong, on one line.

    Arguments:
    - `prompts`: whether what clients wrote may be told.
    """
    known = [part for part in (error.code, error.param) if part]
    if prompts or error.code in _SAID:
        known.append(error.message)
    return _printable(": ".join(known))


def _id_of(scope: Scope) -> str:
    """The id that the client or a proxy has given, else a new one."""
    given = [value for name, value in scope["headers"] if name == _HEADER]
    return given[0].decode() if len(given) == 1 and _ID.fullmatch(given[0]) else uuid.uuid4().hex


def _printable(text: str) -> str:
    """`text` on one line of bounded length."""
    return text[:_SHOWN].encode("unicode_escape").decode()
