"""Tells the engine of requests that are on their way to it."""

import contextlib
from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

_SUBMITTED = "submitted"


class Arrivals:
    """Counts a request that generates as on its way, until `submitted` or its answer.

    Arguments:
    - `expecting`: tells the engine, inside `with`, that a request is on its way (`AsyncEngine.expecting`).
    - `paths`: of the routes that generate.
    """

    def __init__(
        self, app: ASGIApp, expecting: Callable[[], contextlib.AbstractContextManager[Any]], paths: set[str]
    ):
        self._app, self._expecting, self._paths = app, expecting, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        with contextlib.ExitStack() as on_its_way:
            on_its_way.enter_context(self._expecting())
            scope.setdefault("state", {})[_SUBMITTED] = on_its_way.close
            await self._app(scope, receive, send)


def submitted(request: Request) -> None:
    """The engine has the requests of a call."""
    getattr(request.state, _SUBMITTED)()
