"""The parts that are on their way to the device or on it, and counts of those that came back."""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import NamedTuple

from jdllm.serving.runner import Pending
from jdllm.serving.scheduler import Demand, Kind
from jdllm.serving.updates import PartDone


class _Submitted(NamedTuple):
    """A submitted part: its demand, its time, and how long the device was idle before."""

    pending: Pending
    rows: int
    head_rows: int
    submitted: float
    idle: float


class Flight:
    """Parts in the order in which they were submitted.

    - `evaluated`: forward evaluations of the model, as the device reports them.
    """

    def __init__(self):
        self.evaluated = 0
        self._parts: deque[_Submitted] = deque()
        self._counts = {name: Counter[Kind]() for name in ("parts", "rows", "head_rows")}
        self._idle_since: float | None = None

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def first(self) -> Pending:
        return self._parts[0].pending

    @property
    def kinds(self) -> list[Kind]:
        return [part.pending.kind for part in self._parts]

    @property
    def ids(self) -> set[int]:
        """The requests that are on their way."""
        return {request.id for part in self._parts for request in part.pending.requests}

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self._parts)

    def counts(self) -> dict[str, Mapping[Kind, int]]:
        """`parts`, `rows` and `head_rows` of the collected parts, by kind."""
        return {name: {kind: count[kind] for kind in Kind} for name, count in self._counts.items()}

    def add(self, pending: Pending, demands: Sequence[Demand]) -> None:
        """Take in a part that was submitted.

        Arguments:
        - `demands`: of its requests.
        """
        now, since = time.perf_counter(), self._idle_since
        idle = 0.0 if since is None or self._parts else now - since
        rows, head_rows = sum(d.rows for d in demands), sum(d.head_rows for d in demands)
        self._parts.append(_Submitted(pending, rows, head_rows, now, idle))

    def remove_first(self, steps: int) -> PartDone:
        """Count the part that was submitted first, which was collected.

        Arguments:
        - `steps`: that it did.
        """
        part, now = self._parts.popleft(), time.perf_counter()
        if not self._parts:
            self._idle_since = now
        kind, requests = part.pending.kind, len(part.pending.requests)
        self.evaluated += steps
        self._counts["parts"][kind] += 1
        self._counts["rows"][kind] += steps * part.rows
        self._counts["head_rows"][kind] += steps * part.head_rows
        return PartDone(kind, requests, part.rows, part.head_rows, steps, now - part.submitted, part.idle)

    def rest(self) -> None:
        """Until now there was no request: the device was not idle for want of the host."""
        self._idle_since = None

    def drain(self) -> None:
        """Wait for all submitted parts, and forget them."""
        while self._parts:
            wait([self._parts.popleft().pending.trace])
