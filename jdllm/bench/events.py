"""Server-sent events, out of bytes that arrive in pieces of any size."""

from collections.abc import Iterator
from typing import NamedTuple


class Event(NamedTuple):
    """An event: its name, "message" where the server gives none, and its data."""

    name: str
    data: str


class EventParser:
    """Puts events together. Lines end with a line feed, before which a carriage return may stand."""

    def __init__(self):
        self._rest = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that are complete with `piece`; one that was cut off at the end of all is none."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            event = self._take(line.removesuffix(b"\r").decode("utf-8", errors="replace"))
            if event is not None:
                yield event

    def _take(self, line: str) -> Event | None:
        if not line:
            event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
            self._name, self._data = "", []
            return event
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None
