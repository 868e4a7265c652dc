"""Errors in OpenAI's shape, whatever went wrong."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from jdllm.api.fields import UNKNOWN_FIELD
from jdllm.api.protocol import SAMPLING_FIELDS, TemplateFields
from jdllm.arguments import shortened
from jdllm.decoding.registry import options
from jdllm.errors import DoesNotFitError, JdllmError, KvPoolError, NonFiniteError

_log = logging.getLogger("jdllm.api")

_FIELD = re.compile(r"(?!(?:str|int|float|bool|none|any)$)[a-z_]\w*")
"""A field's name, where a validation error has names of types too."""

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class ErrorBody(BaseModel):
    """What was wrong.

    - `type`: the kind of error; `code`: a name for programs.
    - `param`: the field that it concerns.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An error, in OpenAI's shape."""

    error: ErrorBody


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "A field that is wrong, or a request that cannot be served.",
        401: "No API key, or a wrong one.",
        404: "There is no such model.",
        408: "The request took longer than the server allows.",
        409: "The request was cancelled.",
        413: "The body is too large.",
        429: "The queue is full.",
        500: "The server failed.",
        503: "The server is starting, stopping or broken.",
        "4XX": "Another mistake of the client's.",
    }.items()
}
"""What a route documents beside its answer."""


class ApiError(Exception):
    """An answer other than success.

    - `status`: of HTTP.
    - `param`: the field that the error concerns.
    - `code`: a name of the error for programs.
    - `headers`: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message, param = _printable(self.message), self.param and _printable(self.param)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An error of the client's."""
    return ApiError(400, message, param=param, code=code)


def stopping() -> ApiError:
    """The answer of a server that stops before it has another."""
    return ApiError(503, "the server stops before this request is answered", code="server_stopping")


def dead(error: Exception) -> ApiError:
    """The answer of a server whose engine cannot go on."""
    return ApiError(503, f"the engine cannot go on: {type(error).__name__}", code="engine_dead")


def as_api_error(error: Exception) -> ApiError:
    """Whatever an engine or a request raised, as an answer."""
    match error:
        case ApiError():
            return error
        case NonFiniteError():
            return ApiError(500, str(error), code="non_finite")
        case DoesNotFitError() | KvPoolError():
            return bad_request(str(error), code="context_length_exceeded")
        case JdllmError():
            return bad_request(str(error), param=_named_field(str(error)))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, f"the request failed: {type(error).__name__}", code="internal_error")


def install(app: FastAPI, refused: Callable[[Request, ApiError], None]) -> None:
    """Let `app` answer every error in OpenAI's shape.

    Arguments:
    - `refused`: told of each.
    """

    async def answer(request: Request, error: Exception) -> JSONResponse:
        made = _made(error)
        refused(request, made)
        request.state.error = made
        if made.status < 500:
            _let_go(error)
        return made.response()

    for kind in (HTTPException, ApiError, JdllmError):
        app.add_exception_handler(kind, answer)


def _let_go(error: Exception) -> None:
    """The frames that raised an error hold the error, and the body: together they would wait for the garbage
    collector, which comes late where so few objects are so large."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


def _made(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        headers = dict(error.headers) if error.headers else None
        return ApiError(error.status_code, str(error.detail), headers=headers)
    return as_api_error(error)


def of_validation(errors: Sequence[Any]) -> ApiError:
    """What is wrong with a body, as Pydantic tells it."""
    first = _telling(errors)
    place, kind = _place(first), first["type"]
    if kind == UNKNOWN_FIELD:
        place = [*place, first["ctx"]["name"]]
    param = str(place[0]) if place and isinstance(place[0], str) else None
    if param is None:
        return bad_request(f"the body is {shortened(first.get('input'))}, expected a JSON object")
    if kind == "missing":
        return bad_request(f"{path(place)} is missing", param, "missing_field")
    if kind == UNKNOWN_FIELD:
        return bad_request(f"there is no field {path(place)}: {first['msg']}", param, UNKNOWN_FIELD)
    expected = "; or ".join(dict.fromkeys(error["msg"] for error in errors if _place(error) == place))
    return bad_request(f"{path(place)} is {shortened(first['input'])}: {expected}", param, "invalid_value")


def _telling(errors: Sequence[Any]) -> Any:
    """Of what is wrong with the first wrong field the one that came farthest: what a value was most likely
    meant to be."""
    field = _place(errors[0])[:1]
    mine = [error for error in errors if _place(error)[:1] == field]
    return max(
        mine, key=lambda error: (len(_place(error)), [part for part in _place(error) if type(part) is int])
    )


def _place(error: Any) -> list[str | int]:
    """Names of fields and places in lists down to what is wrong, without the types that were tried."""
    return [part for part in error["loc"] if isinstance(part, int) or _FIELD.fullmatch(part)]


def _printable(text: str) -> str:
    """`text` without halves of UTF-16 pairs, which no answer can hold."""
    return text.encode(errors="backslashreplace").decode()


def path(place: Sequence[str | int]) -> str:
    """A place as it is written in Python: `messages[1].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _named_field(message: str) -> str | None:
    """The field that a message begins with."""
    first = message.partition(" ")[0]
    known = (*SAMPLING_FIELDS, *options(), *TemplateFields.model_fields, "mc_num", "batch_size")
    return first if first in known else None
