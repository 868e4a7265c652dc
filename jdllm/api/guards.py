"""What stands before every route: API keys, and bodies of bounded size that arrive in bounded time."""

import asyncio
import secrets
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdllm.api.errors import ApiError

_OPEN = ("/health", "/version", "/metrics", "/openapi.json", "/", "/stats")
_PAGE = "/page/"


class ApiKeys:
    """Lets only those pass who have a key, except to the pages and what monitoring asks.

    Arguments:
    - `keys`: any of which will do.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope) or self._knows(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "this server needs an API key: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"] in _OPEN or scope["path"].startswith(_PAGE) or scope["method"] == "OPTIONS"

    def _knows(self, scope: Scope) -> bool:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, given = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
        # All are compared, so that the time says nothing about any.
        equal = [secrets.compare_digest(given.strip(), key) for key in self._keys]
        return kind.lower() == b"bearer" and any(equal)


class BoundedBodies:
    """Refuses bodies that are too large, or that come too slowly.

    Arguments:
    - `largest`: bytes.
    - `seconds`: that the whole body may take.
    """

    def __init__(self, app: ASGIApp, largest: int, seconds: float):
        self._app, self._largest, self._seconds = app, largest, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(_stated_length(scope))
            body = await asyncio.wait_for(self._read(receive), self._seconds)
        except TimeoutError:
            slow = ApiError(408, f"the body did not arrive within {self._seconds:g} s", code="slow_body")
            await slow.response()(scope, receive, send)
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return
        await self._app(scope, _replayed(body, receive), send)

    def _check(self, size: int) -> None:
        if size > self._largest:
            raise ApiError(
                413,
                f"the body is larger than {self._largest} bytes",
                code="body_too_large",
                headers={"Connection": "close"},
            )

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, `None` where the client has gone."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            self._check(size)
            if not message.get("more_body", False):
                return b"".join(parts)


def _stated_length(scope: Scope) -> int:
    stated = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(stated[0]) if stated and stated[0].isdigit() else 0


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives `body` first, and then what else arrives."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
