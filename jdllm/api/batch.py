"""Files of requests in OpenAI's batch format, answered by the application without a port.

A line of requests is `{"custom_id", "method": "POST", "url", "body"}`. A line of answers is
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx
from starlette.types import ASGIApp

from jdllm.api.app import create_app
from jdllm.api.metrics import Metrics
from jdllm.api.service import Service, Settings
from jdllm.arguments import shortened
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.serving.async_engine import AsyncEngine

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/infill", "/v1/score")

_IN_FLIGHT = 256
"""Requests that the engine may choose from."""

_OPENING = b'{"id": "batch_req-'
"""What a line of answers begins with."""


class Task(NamedTuple):
    """A line of requests."""

    custom_id: str
    url: str
    body: dict[str, Any]


class Wrong(NamedTuple):
    """A line that is no request, and why; `custom_id`: where it has one."""

    custom_id: str | None
    why: str

    @property
    def key(self) -> str:
        """What tells it from other lines."""
        return self.why if self.custom_id is None else self.custom_id

    def answer(self) -> dict[str, Any]:
        """Its line of answers."""
        return _line(self.custom_id, error={"code": "invalid_line", "message": self.why})


class EngineDeadError(Exception):
    """The engine cannot go on; what is not answered yet is left."""


def read_requests(text: str) -> tuple[list[Task], list[Wrong]]:
    """Read the lines that are not blank.

    Raises `RequestError` where two lines have one `custom_id`: their answers could not be told apart.
    """
    tasks, wrong, numbers = [], [], {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        read = _read(number, line)
        if read.custom_id is not None:
            first = numbers.setdefault(read.custom_id, number)
            if first != number:
                name = shortened(read.custom_id)
                raise RequestError(
                    f"lines {first} and {number} have one custom_id, {name}: give each its own"
                )
        (tasks if isinstance(read, Task) else wrong).append(read)
    return tasks, wrong


def _read(number: int, line: str) -> Task | Wrong:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as e:
        return Wrong(None, f"line {number} is not JSON ({e})")
    if not isinstance(entry, dict):
        return Wrong(None, f"line {number} is no object: expected custom_id, method, url and body")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Wrong(None, f"line {number} has no custom_id, or one that is no text")
    url, body = entry.get("url"), entry.get("body")
    if entry.get("method", "POST") != "POST":
        return Wrong(custom_id, f"line {number}: the method is {shortened(entry['method'])}, expected POST")
    if url not in ROUTES:
        return Wrong(
            custom_id, f"line {number}: the url is {shortened(url)}, expected one of {', '.join(ROUTES)}"
        )
    if not isinstance(body, dict):
        return Wrong(custom_id, f"line {number}: the body is no object")
    if body.get("stream"):
        return Wrong(custom_id, f"line {number}: a batch has no streams: leave stream out")
    return Task(custom_id, url, body)


class AnswerFile:
    """The file of answers, a line each. A run that was killed can be started again: what its last line lacks
    is cut off.

    Arguments:
    - `path`: of the file, which need not exist.

    `known` is what the answered lines are told apart by. Raises `RequestError` for a file that cannot be
    written, and one that holds something else.
    """

    def __init__(self, path: Path):
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content.rfind(b"\n") + 1
            lines = content[:whole].split(b"\n")[:-1]
            self.known = {_key(path, number, line) for number, line in enumerate(lines, start=1)}
            torn = content[whole:]
            if torn[: len(_OPENING)] != _OPENING[: len(torn)]:
                raise _foreign(path, len(lines) + 1)
            self._file = path.open("ab")
            self._file.truncate(whole)
        except OSError as e:
            raise RequestError(f"{path} cannot be written: {e.strerror}") from None

    def add(self, answer: dict[str, Any]) -> None:
        """Append a line, so that it stays where the process is killed next."""
        self._file.write(json.dumps(answer).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _key(path: Path, number: int, line: bytes) -> str:
    try:
        answer = json.loads(line)
        key = answer["custom_id"] or answer["error"]["message"]
    except (ValueError, TypeError, LookupError, RecursionError):
        raise _foreign(path, number) from None
    return key


def _foreign(path: Path, number: int) -> RequestError:
    return RequestError(f"{path} line {number} is no answer of a batch: name a file of answers, or a new one")


def run_batch(llm: LLM, names: tuple[str, ...], tasks: Iterable[Task], add: Callable[[Any], None]) -> None:
    """Answer requests as a server of `llm` would.

    Arguments:
    - `names`: that the model answers to.
    - `add`: takes each line of answers.

    Raises `EngineDeadError` where the engine cannot go on.
    """
    engine, metrics = AsyncEngine(llm.engine), Metrics(names[0], llm.engine, llm.executables)
    service = Service(llm, engine, Settings(names, llm.default_sampling(), max_queue=sys.maxsize), metrics)
    try:
        asyncio.run(answer_all(create_app(service), tasks, add))
    finally:
        service.close()
        engine.close()


async def answer_all(app: ASGIApp, tasks: Iterable[Task], add: Callable[[Any], None]) -> None:
    """Ask an application many requests at a time; `add` takes each line of answers."""
    waiting = iter(tasks)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def answer(client: httpx.AsyncClient) -> None:
        for task in waiting:
            add(await _answer(client, task))

    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
        await asyncio.gather(*(answer(client) for _ in range(_IN_FLIGHT)))


async def _answer(client: httpx.AsyncClient, task: Task) -> dict[str, Any]:
    content = json.dumps(task.body).encode()
    answer = await client.post(task.url, content=content, headers={"Content-Type": "application/json"})
    body = answer.json()
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise EngineDeadError(body["error"]["message"])
    told = {"status_code": answer.status_code, "request_id": answer.headers["x-request-id"], "body": body}
    return _line(task.custom_id, response=told)


def _line(custom_id: str | None, *, response: Any = None, error: Any = None) -> dict[str, Any]:
    return {
        "id": f"batch_req-{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
