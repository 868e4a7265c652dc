"""The parts that are on their way to the device or on it, and counts of those that came back."""

import time
from collections import Counter, deque
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import wait
from typing import Any, NamedTuple

from jdllm.serving.ahead import later, with_stored
from jdllm.serving.demands import CHEAP, Demand, Kind
from jdllm.serving.request import Request
from jdllm.serving.runner import Pending
from jdllm.serving.updates import PartDone, PartTimes


class _Submitted(NamedTuple):
    """A submitted part: its demand, when its packing began, when each of its requests became ready, and how
    long the device was idle before."""

    pending: Pending
    rows: int
    head_rows: int
    packing: float
    ready: tuple[float, ...]
    idle: float


class Flight:
    """Parts in the order in which they were submitted.

    - `evaluated`: forward evaluations of the model, as the device reports them.
    - `busy`, `waited`: seconds of the collected parts by kind, as `Stats` names them.
    """

    def __init__(self):
        self.evaluated = 0
        self._parts: deque[_Submitted] = deque()
        self._counts = {name: Counter[Kind]() for name in ("parts", "served", "rows", "padding", "head_rows")}
        self.busy = dict.fromkeys(Kind, 0.0)
        self.waited = dict.fromkeys(Kind, 0.0)
        self._idle_since: float | None = None
        self._ended = 0.0

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

    def counts(self) -> dict[str, Any]:
        """What is known of the collected parts, as `Stats` names it."""
        counts = {name: {kind: count[kind] for kind in Kind} for name, count in self._counts.items()}
        return {"evaluated": self.evaluated, "busy": dict(self.busy), "waited": dict(self.waited), **counts}

    def ahead(self, alive: Container[int]) -> Iterator[Request]:
        """The requests of parts in flight that may be in a further part meanwhile, a part later.

        Each is a copy, which waits for tokens of its part: these are for reuses and decodes alone. There are
        none where two such parts are in flight.

        Arguments:
        - `alive`: ids of the requests that have not ended.
        """
        parts = [part.pending for part in self._parts if part.pending.kind in (Kind.REFRESH, *CHEAP)]
        kinds = [part.kind for part in parts]
        late = any(part.kind in CHEAP and part.launch.left_at is None for part in parts)
        if late or len(set(kinds)) < len(kinds):
            return
        parts_of = Counter(request.id for part in parts for request in part.requests)
        for part in parts:
            for index, request in enumerate(part.requests):
                some = request.id in alive and parts_of[request.id] == 1
                after = later(request, part.launch, index) if some else None
                if after is not None:
                    yield after

    def behind_stores(self, alive: Container[int]) -> Iterator[Request]:
        """The requests of parts in flight that store rows of them and find no tokens, as they will be then.

        Arguments:
        - `alive`: ids of the requests that have not ended.
        """
        parts_of = Counter(request.id for part in self._parts for request in part.pending.requests)
        for pending in (part.pending for part in self._parts):
            launch = pending.launch
            of_each = zip(pending.requests, launch.candidates, launch.stored, strict=True)
            for request, found, stored in of_each:
                alone = request.id in alive and parts_of[request.id] == 1
                if alone and stored is not None and not len(found):
                    yield with_stored(request, stored)

    def add(
        self, pending: Pending, demands: Sequence[Demand], packing: float, ready: Sequence[float]
    ) -> None:
        """Take in a part that was submitted.

        Arguments:
        - `demands`: of its requests.
        - `packing`: when its packing began.
        - `ready`: when each of its requests could be served.
        """
        since = self._idle_since
        idle = 0.0 if since is None or self._parts else pending.packed - since
        rows, head_rows = sum(d.rows for d in demands), sum(d.head_rows for d in demands)
        self._parts.append(_Submitted(pending, rows, head_rows, packing, tuple(ready), idle))

    def remove_first(self, steps: int) -> PartDone:
        """Count the part that was submitted first, which was collected.

        Arguments:
        - `steps`: that it did.
        """
        part, now = self._parts.popleft(), time.perf_counter()
        if not self._parts:
            self._idle_since = now
        pending, ran = part.pending, part.pending.ran.result()
        began, self._ended = max(ran.launched, self._ended), ran.ended
        times = PartTimes(part.ready, part.packing, pending.packed, began, ran.ended, now)
        padding = max(0, pending.launch.rows - part.rows)
        ids = tuple(request.id for request in pending.requests)
        done = PartDone(pending.kind, ids, part.rows, padding, part.head_rows, steps, part.idle, times)
        self._count(done)
        return done

    def _count(self, done: PartDone) -> None:
        kind, steps = done.kind, done.steps
        self.evaluated += steps
        self._counts["parts"][kind] += 1
        self._counts["served"][kind] += steps * done.requests
        self._counts["rows"][kind] += steps * done.rows
        self._counts["padding"][kind] += steps * done.padding
        self._counts["head_rows"][kind] += steps * done.head_rows
        self.busy[kind] += done.busy
        self.waited[kind] += done.waited

    def rest(self) -> None:
        """Until now there was no request: the device was not idle for want of the host."""
        self._idle_since = None

    def drain(self) -> None:
        """Wait for all submitted parts, and forget them."""
        while self._parts:
            wait([self._parts.popleft().pending.ran])
