"""What stands before every route: names of this server, API keys, and bodies of bounded size that arrive in
bounded time."""

import asyncio
import re
import secrets
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdllm.api.errors import ApiError
from jdllm.api.memory import LARGE, FreedMemory

_OPEN = ("/health", "/version", "/metrics", "/openapi.json", "/", "/stats")
_PAGE = "/page/"
_PORT = re.compile(r":\d*$")


class AllowedHosts:
    """Answers only requests that name this server in `Host`.

    A page of a stranger can let a name of its own lead to this server (DNS rebinding), and would then ask
    with the rights of whoever looks at the page.

    Arguments:
    - `names`: without ports, of which any will do.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]):
        self._app, self._names = app, {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        if all(_PORT.sub("", host).lower() in self._names for host in hosts):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            400,
            "Host is no name of this server: whoever runs it can allow the name with --allowed-host",
            code="host_not_allowed",
        )
        await _refuse(refusal, scope, receive, send)


class ApiKeys:
    """Lets only those pass who have a key, except to the pages and what monitoring asks.

    Whoever has passed is `owner` in the request's state: the number of the key, `None` for the admin's.

    Arguments:
    - `keys`: any of which will do.
    - `admin_key`: a further one, whose owner sees the requests of all.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_key: str | None = None):
        self._app = app
        self._owners: list[tuple[int | None, bytes]] = [(i, key.encode()) for i, key in enumerate(keys)]
        if admin_key is not None:
            self._owners.insert(0, (None, admin_key.encode()))

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
        await _refuse(refusal, scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"] in _OPEN or scope["path"].startswith(_PAGE) or scope["method"] == "OPTIONS"

    def _knows(self, scope: Scope) -> bool:
        # A router may send its own key beside the client's: the same header twice.
        headers = {value for name, value in scope["headers"] if name == b"authorization"}
        kind, _, given = headers.pop().partition(b" ") if len(headers) == 1 else (b"", b"", b"")
        # All are compared, so that the time says nothing about any.
        owners = [owner for owner, key in self._owners if secrets.compare_digest(given.strip(), key)]
        if kind.lower() != b"bearer" or not owners:
            return False
        scope.setdefault("state", {})["owner"] = owners[0]
        return True


class BoundedBodies:
    """Refuses bodies that are too large, or that come too slowly.

    Arguments:
    - `largest`: bytes.
    - `seconds`: that the whole body may take.
    """

    def __init__(self, app: ASGIApp, largest: int, seconds: float):
        self._app, self._largest, self._seconds = app, largest, seconds
        self._memory = FreedMemory()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(_stated_length(scope))
            body = await asyncio.wait_for(self._read(receive), self._seconds)
        except TimeoutError:
            slow = ApiError(408, f"the body did not arrive within {self._seconds:g} s", code="slow_body")
            await _refuse(slow, scope, receive, send)
            return
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        if body is None:
            return
        try:
            await self._app(scope, _replayed(body, receive), send)
        finally:
            if len(body) > LARGE:
                self._memory.give_back()

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


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    scope.setdefault("state", {})["error"] = error
    await error.response()(scope, receive, send)


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
