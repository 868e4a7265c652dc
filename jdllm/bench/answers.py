"""What a server answers to one generation, whichever way it tells it."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from jdllm.bench.events import Event

DONE = "[DONE]"
_EXCERPT = 200


class BadAnswer(Exception):  # noqa: N818 - the server's mistake, which is recorded
    """An answer that does not count as one; the message says why."""


class Answer(NamedTuple):
    """What is recorded of an answer.

    - `nfe`: forward evaluations of the request, where the server says so.
    - `first_text`, `first_block`: when they were there, on the reader's clock; `None` where nothing
      told.
    """

    prompt_tokens: int
    completion_tokens: int
    finish_reason: str | None
    nfe: int | None
    first_text: float | None = None
    first_block: float | None = None


class Stream(Protocol):
    """Takes the events of an answer as they come; both raise `BadAnswer`."""

    def take(self, event: Event, now: float) -> None: ...

    def answer(self) -> Answer: ...


class TextStream:
    """OpenAI's chunks, with the usage so far in each.

    Arguments:
    - `block_length`: tokens of the first block, where they are known.
    """

    def __init__(self, block_length: int | None):
        self._block_length = block_length
        self._choice: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._first_text: float | None = None
        self._first_block: float | None = None
        self._done = False

    def take(self, event: Event, now: float) -> None:
        if event.data == DONE:
            self._done = True
            return
        chunk = _object(event.data)
        if "error" in chunk:
            raise BadAnswer(error_message(event.data))
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            if self._first_text is None and (choice.get("text") or delta.get("content")):
                self._first_text = now
            self._choice |= {key: choice[key] for key in ("finish_reason", "nfe") if choice.get(key)}
        told = self._usage.get("completion_tokens", 0)
        if self._first_block is None and self._block_length and told >= self._block_length:
            self._first_block = now

    def answer(self) -> Answer:
        if not self._done:
            raise BadAnswer(f"the stream ended without {DONE}")
        return _answer(self._usage, self._choice, self._first_text, self._first_block)


class DenoiseStream:
    """An event for every step, with what it commits."""

    def __init__(self):
        self._left: set[int] = set()
        self._end: dict[str, Any] | None = None
        self._first_text: float | None = None
        self._first_block: float | None = None
        self._done = False

    def take(self, event: Event, now: float) -> None:
        if event.data == DONE:
            self._done = True
        elif event.name == "error":
            raise BadAnswer(error_message(event.data))
        elif event.name == "start":
            self._left = set(range(*_object(event.data)["blocks"][0]))
        elif event.name == "step" and self._left:
            self._commit(_object(event.data), now)
        elif event.name == "end":
            self._end = _object(event.data)

    def _commit(self, step: Mapping[str, Any], now: float) -> None:
        pairs = zip(step["positions"], step["committed"], strict=True)
        committed = {position for position, is_committed in pairs if is_committed}
        self._left -= committed
        if committed and self._first_text is None:
            self._first_text = now
        if not self._left:
            self._first_block = now

    def answer(self) -> Answer:
        if not self._done:
            raise BadAnswer(f"the stream ended without {DONE}")
        if self._end is None:
            raise BadAnswer("the stream has no event 'end'")
        return _answer(self._end.get("usage"), self._end, self._first_text, self._first_block)


def read_whole(body: str | bytes) -> Answer:
    """Read an answer that came in one piece; raises `BadAnswer`."""
    values = _object(body)
    if not values.get("choices"):
        raise BadAnswer("the answer has no choices")
    return _answer(values.get("usage"), values["choices"][0], None, None)


def error_message(body: str | bytes) -> str:
    """What an error says, in OpenAI's shape or in another."""
    text = body if isinstance(body, str) else body.decode("utf-8", errors="replace")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    error = values.get("error") if isinstance(values, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return " ".join((message if isinstance(message, str) else text[:_EXCERPT]).split())


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadAnswer(f"the answer is not readable as JSON: {e}") from None
    if not isinstance(values, dict):
        raise BadAnswer(f"the answer is a {type(values).__name__}, expected an object")
    return values


def _answer(
    usage: object, choice: Mapping[str, Any], first_text: float | None, first_block: float | None
) -> Answer:
    if not isinstance(usage, dict) or not isinstance(usage.get("completion_tokens"), int):
        raise BadAnswer("the answer has no usage: its tokens cannot be counted")
    return Answer(
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage["completion_tokens"],
        finish_reason=choice.get("finish_reason"),
        nfe=choice.get("nfe") or usage.get("forward_evaluations"),
        first_text=first_text,
        first_block=first_block,
    )
