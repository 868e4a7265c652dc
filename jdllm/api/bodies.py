"""Bodies of requests: bounded before anything is made of them, and read beside the event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from jdllm.api.errors import ApiError, bad_request, of_validation
from jdllm.api.service import Service

MOST_VALUES = 1 << 19
"""Values of one body, such as token ids, unless the longest sequence has more."""

MOST_PARTS = 1 << 16
"""Texts, names, lists and objects of one body."""

MOST_ESCAPES = 1 << 22
"""Escaped characters of one body."""

MOST_FIELDS = 256
"""Fields of the object that a body is."""

_SMALL = 32 << 10
"""Bytes of a body that can hold no more than is read in some milliseconds: nothing is counted in it."""

_CHUNK = 1 << 19
_QUOTE, _BACKSLASH, _COMMA, _OPENING = b'"'[0], b"\\"[0], b","[0], b"[{"


class BodyRoute(APIRoute):
    """A route that reads its body beside the event loop, so that no body holds up other requests.

    The body is JSON whatever its `Content-Type` says.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

        async def read_first(request: Request) -> Response:
            service: Service = request.app.state.service
            body, loop = await request.body(), asyncio.get_running_loop()
            read = await loop.run_in_executor(service.reading, read_body, model, body, service.room)
            if isinstance(read, ApiError):
                raise read
            return await handle(_Read(request, read))

        return read_first


class _Read(Request):
    """A request whose body is read already."""

    def __init__(self, request: Request, read: BaseModel):
        request.scope["headers"] = [
            *((name, value) for name, value in request.scope["headers"] if name != b"content-type"),
            (b"content-type", b"application/json"),
        ]
        super().__init__(request.scope, request.receive)
        self._read = read

    async def body(self) -> bytes:
        """Not empty."""
        return b"{}"

    async def json(self) -> BaseModel:
        """What FastAPI takes as it is, since it is of the class that the route declares."""
        return self._read


def read_body[T: BaseModel](model: type[T], body: bytes, longest: int) -> T | ApiError:
    """A body as an object of `model`, or what is wrong with it: an error without frames, which would hold it.

    Arguments:
    - `longest`: tokens of the longest sequence that is served, whose ids may be in a body.
    """
    try:
        check_size(body, max(MOST_VALUES, longest))
        read = from_json(body, cache_strings="keys")
        if isinstance(read, dict) and len(read) > MOST_FIELDS:
            return bad_request(f"the body has {len(read)} fields, expected at most {MOST_FIELDS}")
        return model.model_validate(read)
    except ApiError as error:
        return error.with_traceback(None)
    except ValidationError as error:
        return of_validation(error.errors(include_url=False))
    except ValueError as error:
        return bad_request(f"the body is no JSON: {error}", code="invalid_json")


def check_size(body: bytes, most_values: int) -> None:
    """Raise `ApiError` for a body of more values, parts or escapes than any request needs.

    Objects are many times larger than the JSON that they are read from, and reading lets no other thread
    run. NumPy counts without either.

    Arguments:
    - `body`: JSON, or what claims to be.
    - `most_values`: elements of all lists and fields of all objects.
    """
    if len(body) <= _SMALL:
        return
    data, inside, escaped = np.frombuffer(body, np.uint8), False, False
    values = parts = escapes = 0
    for start in range(0, len(data), _CHUNK):
        chunk = data[start : start + _CHUNK]
        backslashes = np.flatnonzero(chunk == _BACKSLASH)
        quotes, escaped = _quotes(chunk, backslashes, escaped=escaped)
        escapes += len(backslashes)
        outside = (np.cumsum(quotes, dtype=np.uint8) + inside) % 2 == 0
        inside = not outside[-1]
        opened = np.count_nonzero(np.isin(chunk, list(_OPENING)) & outside)
        values += opened + np.count_nonzero((chunk == _COMMA) & outside)
        parts += opened + np.count_nonzero(quotes & ~outside)
        if values > most_values or parts > MOST_PARTS or escapes > MOST_ESCAPES:
            raise bad_request(
                f"the body holds too much: expected at most {most_values} values, {MOST_PARTS} texts, names,"
                f" lists and objects, and {MOST_ESCAPES} escaped characters",
                code="body_too_complex",
            )


def _quotes(chunk: np.ndarray, at: np.ndarray, *, escaped: bool) -> tuple[np.ndarray, bool]:
    """Where texts begin and end in a stretch of JSON, and whether its end escapes what follows.

    Arguments:
    - `chunk`: bytes.
    - `at`: where backslashes are.
    - `escaped`: whether the first byte is escaped.
    """
    quotes = chunk == _QUOTE
    if escaped:
        quotes[0], at = False, at[at > 0]
    if not at.size:
        return quotes, False
    index = np.arange(at.size)
    run = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) > 1, index, 0))
    after = at[(index - run) % 2 == 0] + 1  # of a run of backslashes the first escapes the second, and so on
    quotes[after[after < chunk.size]] = False
    return quotes, bool(after[-1] == chunk.size)
