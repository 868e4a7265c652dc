"""What an engine did when, as a file for Perfetto or chrome://tracing."""

import heapq
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jdllm.errors import ConfigError
from jdllm.serving.request import Request
from jdllm.serving.updates import PartDone

_DEVICE, _HOST, _REQUESTS = 1, 2, 3
_PROCESSES = {_DEVICE: "device", _HOST: "host", _REQUESTS: "requests"}
_PACKING, _TAKING = 0, 1
_MICROSECONDS = 1e6

_log = logging.getLogger("jdllm")


class Trace:
    """Writes events in the Trace Event Format, as a JSON array that grows.

    Spans of the device are parts with their rows, padding, steps and requests. Spans of the host tell how
    long each part was packed (line 0), and how long its results waited to be taken in (line 1). Each request
    has a line of spans: for what it waits, and which part serves it. A line is free again when its request
    has ended. Parts are written by `catch_up`, while the device is busy with the next ones.

    Arguments:
    - `path`: the file; an older one is replaced.

    Raises `ConfigError` where it cannot be written. Later a full disk ends the trace with a warning, and
    nothing else.
    """

    def __init__(self, path: str | Path):
        self._begin = time.perf_counter()
        self._lines = itertools.count()
        self._free: list[int] = []
        self._line: dict[int, int] = {}
        self._told: dict[int, float] = {}
        self._parts: deque[tuple[PartDone, Mapping[int, Request]]] = deque()
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # it stays open
        except OSError as e:
            raise ConfigError(f"trace is {str(path)!r}, which cannot be written: {e.strerror}") from None
        self._write(
            [
                {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
                for process, name in _PROCESSES.items()
            ],
            before="[",
        )

    def part(self, done: PartDone, requests: Mapping[int, Request]) -> None:
        """Take in a part that was collected.

        Arguments:
        - `requests`: that it served and that have not left since, by id.
        """
        self._parts.append((done, requests))

    def catch_up(self) -> None:
        """Write the parts that were taken in."""
        while self._parts:
            done, requests = self._parts.popleft()
            self._write([*self._of_part(done), *self._of_requests(done, requests)])

    def left(self, request: Request, how: str) -> None:
        """Take in a request that has left the engine.

        Arguments:
        - `how`: "finished", "failed" or "aborted".
        """
        self.catch_up()
        line, now = self._line_of(request), time.perf_counter()
        events = [{"name": how, "ph": "i", "s": "t", **self._place(_REQUESTS, line, now)}]
        if request.started is None:
            events += self._waits_for_a_start(request, now)
        self._write(events)
        self._told.pop(request.id, None)
        heapq.heappush(self._free, self._line.pop(request.id))

    def discard(self) -> None:
        """Remove the file: there is no engine."""
        self._file.close()
        Path(self._file.name).unlink()

    def close(self) -> None:
        """End the array, and close the file."""
        self.catch_up()
        self._write(
            [{"name": "closed", "ph": "i", "s": "g", **self._place(_DEVICE, 0, time.perf_counter())}], end="]"
        )
        self._file.close()

    def _of_part(self, done: PartDone) -> Iterator[dict[str, Any]]:
        kind, times = done.kind.name.lower(), done.times
        said = {
            "requests": done.requests,
            "rows": done.rows,
            "padding": done.padding,
            "head_rows": done.head_rows,
            "steps": done.steps,
        }
        yield from self._span(kind, _DEVICE, 0, times.began, times.ended, said)
        yield from self._span(
            kind, _HOST, _PACKING, times.packing, times.submitted, {"idle_before": done.idle}
        )
        yield from self._span(kind, _HOST, _TAKING, times.ended, times.collected)

    def _of_requests(self, done: PartDone, requests: Mapping[int, Request]) -> Iterator[dict[str, Any]]:
        kind, times = done.kind.name.lower(), done.times
        for id, ready in zip(done.ids, times.ready, strict=True):
            if id not in requests:
                continue
            if id not in self._line:
                yield from self._waits_for_a_start(requests[id], ready)
            line, said = self._line[id], {"id": id}
            # A part that was submitted while another one served the request is shown behind that one.
            begin = max(ready, self._told.get(id, ready))
            submitted = max(times.submitted, begin)
            if begin < submitted:
                yield from self._span(f"waits for {kind}", _REQUESTS, line, begin, submitted, said)
            yield from self._span(kind, _REQUESTS, line, submitted, times.collected, said)
            self._told[id] = times.collected

    def _waits_for_a_start(self, request: Request, end: float) -> Iterator[dict[str, Any]]:
        said = {
            "id": request.id,
            "prompt_tokens": len(request.prompt),
            "tokens": len(request.tokens),
            "blocks": len(request.blocks),
        }
        line = self._line_of(request)
        return self._span("waits for a start", _REQUESTS, line, request.created, end, said)

    def _line_of(self, request: Request) -> int:
        """The line of a request: the lowest that is free."""
        if request.id not in self._line:
            self._line[request.id] = heapq.heappop(self._free) if self._free else next(self._lines)
        return self._line[request.id]

    def _span(
        self, name: str, process: int, line: int, start: float, end: float, said: dict[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        span = {
            "name": name,
            "ph": "X",
            **self._place(process, line, start),
            "dur": _MICROSECONDS * (end - start),
        }
        yield span if said is None else span | {"args": said}

    def _place(self, process: int, line: int, moment: float) -> dict[str, Any]:
        return {"pid": process, "tid": line, "ts": _MICROSECONDS * (moment - self._begin)}

    def _write(self, events: Sequence[dict[str, Any]], before: str = ",\n", end: str = "") -> None:
        if self._file.closed:
            return
        try:
            self._file.write(before + ",\n".join(map(json.dumps, events)) + end)
            self._file.flush()
        except OSError as e:
            _log.warning("the trace ends: %s cannot be written: %s", self._file.name, e.strerror)
            self._file.close()
