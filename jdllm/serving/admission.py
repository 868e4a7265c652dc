"""Which requests start: a count of pages and rows over their whole lives."""

import bisect
from collections import Counter
from typing import NamedTuple

from jdllm.errors import RequestError
from jdllm.serving.demands import Life, Limits
from jdllm.serving.shares import Caller, Rounds

_PAGES, _HELD = "pages", "held"


class Waiting(NamedTuple):
    """A request that waits.

    - `priority`, `round`: the lowest starts first.
    - `arrival`: its place in the order of arrival.
    - `call`: requests of one call share its turns.
    """

    priority: int
    round: float
    arrival: int
    request: int
    life: Life
    call: int


class Admission:
    """Requests that wait, and the room that running ones leave.

    Arguments:
    - `limits`: what the engine has room for.

    `free_pages` are the pages that no running request holds.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._order: list[Waiting] = []
        self._waiting: dict[int, Waiting] = {}
        self._rounds = {_PAGES: Rounds(), _HELD: Rounds()}
        self._arrivals = 0
        self.free_pages = limits.pages
        self._rows: Counter[str | int] = Counter()
        self._running: Counter[str | int] = Counter()
        self._takers = 0

    def __contains__(self, request: int) -> bool:
        return request in self._waiting

    @property
    def waiting(self) -> tuple[int, ...]:
        """Requests that wait, in the order of their arrival. Any thread may ask."""
        return tuple(self._waiting)

    @property
    def without_pages(self) -> int:
        """How many requests run without pages."""
        return self._running.total() - self._running[_PAGES]

    def check(self, life: Life) -> None:
        """Raise `RequestError` for a request that could not run even alone. Any thread may ask."""
        limits = self._limits
        if life.pages > limits.pages:
            raise RequestError(
                f"a request needs {life.pages} pages of the KV pool, which has {limits.pages}:"
                " shorten its prompt or its generation, or make the pool larger"
            )
        longest = limits.longest_refresh if life.pages else limits.longest
        if life.rows > longest:
            raise RequestError(
                f"a request has a step of {life.rows} rows, and at most {longest} fit:"
                " shorten its prompt or its generation, or give more memory"
            )

    def add(self, request: int, life: Life, caller: Caller) -> None:
        """Let `request` wait: see `Scheduler.add`."""
        rounds = self._rounds_of(life)
        round = 0.0 if rounds is None else rounds.join(caller.call)
        waiting = Waiting(caller.priority, round, self._arrivals, request, life, caller.call)
        self._waiting[request] = waiting
        self._arrivals += 1
        bisect.insort(self._order, waiting)

    def remove(self, request: int, *, starts: bool = False) -> None:
        """Take out a request that waits, because it starts or because nobody wants it any more."""
        waiting = self._waiting.pop(request)
        if (rounds := self._rounds_of(waiting.life)) is not None:
            rounds.leave(waiting.call, served=starts)
        del self._order[bisect.bisect_left(self._order, waiting)]

    def admit(self) -> list[Waiting]:
        """Start all that may start: see `Scheduler.admit`. Returns them in the order in which they start."""
        admitted: list[Waiting] = []
        full: set[str | int] = set()
        for waiting in self._order:
            life, group = waiting.life, _group(waiting.life, waiting.call)
            if group in full or not self._has_room(life, group):
                full.add(group)
            elif self._takes_pool(life) and (_PAGES in full or self._running[_PAGES]):
                full |= {group, _PAGES}
            else:
                self._start(life, group)
                admitted.append(waiting)
        for waiting in admitted:
            self.remove(waiting.request, starts=True)
        return admitted

    def release(self, life: Life, call: int) -> None:
        """Take in that a running request has left."""
        group = _group(life, call)
        self.free_pages += life.pages
        self._running[group] -= 1
        self._rows[group] -= life.rows
        self._takers -= self._takes_pool(life)
        if not self._running[group]:
            del self._running[group], self._rows[group]

    def _start(self, life: Life, group: str | int) -> None:
        self.free_pages -= life.pages
        self._running[group] += 1
        self._rows[group] += life.rows
        self._takers += self._takes_pool(life)

    def _has_room(self, life: Life, group: str | int) -> bool:
        if self._running[group] >= self._limits.max_num_seqs:
            return False
        if life.pages:
            return life.pages <= self.free_pages and not self._takers
        return not self._rows[group] or self._rows[group] + life.rows <= self._limits.whole_rows

    def _rounds_of(self, life: Life) -> Rounds | None:
        """The rounds in which calls take part that need the same."""
        if life.pages or self._takes_pool(life):
            return self._rounds[_PAGES]
        return self._rounds[_HELD] if life.holds else None

    def _takes_pool(self, life: Life) -> bool:
        return life.pages == 0 and life.rows > self._limits.beside_pool


def _group(life: Life, call: int) -> str | int:
    """Requests that share a limit: those with pages, those that hold something else, or one call's."""
    if life.pages:
        return _PAGES
    return _HELD if life.holds else call
