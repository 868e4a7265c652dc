"""Which requests start: a count of pages and rows over their whole lives."""

import bisect
from typing import NamedTuple

from jdllm.errors import RequestError
from jdllm.serving.demands import CALL_SHARE, Life, Limits
from jdllm.serving.shares import Caller, Rounds

type _Group = str | int
"""Requests that share a limit: those with pages, those that hold something else, or one call's."""

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


class _Taken(NamedTuple):
    """What some running requests take together."""

    requests: int = 0
    rows: int = 0
    pages: int = 0

    def plus(self, life: Life, count: int) -> "_Taken":
        return _Taken(self.requests + count, self.rows + count * life.rows, self.pages + count * life.pages)


_NOTHING = _Taken()


class Admission:
    """Requests that wait, and the room that running ones leave.

    Arguments:
    - `limits`: what the engine has room for. The attribute may be replaced by one that is shared or not.

    `free_pages` are the pages that no running request holds, `without_pages` counts running requests without
    pages.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self._order: list[Waiting] = []
        self._waiting: dict[int, Waiting] = {}
        self._rounds = {_PAGES: Rounds(), _HELD: Rounds()}
        self._arrivals = 0
        self.free_pages = limits.pages
        self._taken: dict[_Group | tuple[_Group, int], _Taken] = {}
        self.without_pages = self._takers = self._alone = 0

    def __contains__(self, request: int) -> bool:
        return request in self._waiting

    @property
    def waiting(self) -> tuple[int, ...]:
        """Requests that wait, in the order of their arrival. Any thread may ask."""
        return tuple(self._waiting)

    def check(self, life: Life) -> None:
        """Raise `RequestError` for a request that could not run even alone. Any thread may ask."""
        limits = self.limits
        if life.pages > limits.pages:
            raise RequestError(
                f"a request needs {life.pages} pages of the KV pool, which has {limits.pages}:"
                " shorten its prompt or its generation, or make the pool larger"
            )
        longest = limits.longest_refresh if life.pages else limits.longest
        if life.rows > longest and not life.alone:
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
        passed: list[Waiting] = []
        full: set[_Group | tuple[_Group, int]] = set()
        for waiting in self._order:
            life, group = waiting.life, _group(waiting.life, waiting.call)
            of_call = group, waiting.call
            if group in full or of_call in full:
                continue
            if not self._leaves_room(life, group, self._taken.get(of_call, _NOTHING)):
                full.add(of_call)
                passed.append(waiting)
            elif not self._has_room(life, self._taken.get(group, _NOTHING)):
                full.add(group)
            elif self._takes_pool(life) and (_PAGES in full or not self._pool_is_free(life)):
                full |= {group, _PAGES}
            else:
                self._count(life, waiting.call, 1)
                admitted.append(waiting)
        for waiting in admitted:
            self.remove(waiting.request, starts=True)
        for waiting in passed:
            self._put_back(waiting)
        return admitted

    def release(self, life: Life, call: int) -> None:
        """Take in that a running request has left."""
        self._count(life, call, -1)

    def _count(self, life: Life, call: int, change: int) -> None:
        """Count a request that starts, with a `change` of 1, or has left, with -1."""
        self.free_pages -= change * life.pages
        self.without_pages += change * (not life.pages)
        self._takers += change * self._takes_pool(life)
        self._alone += change * life.alone
        group = _group(life, call)
        for key in (group, (group, call)):
            taken = self._taken.pop(key, _NOTHING).plus(life, change)
            if taken.requests:
                self._taken[key] = taken

    def _put_back(self, first: Waiting) -> None:
        """Keep a call that others have passed from gaining turns meanwhile: `first` of its requests counts as
        one that comes now, and the others follow."""
        rounds = self._rounds_of(first.life)
        late = 0 if rounds is None else rounds.put_back(first.call, first.round)
        if not late:
            return
        for waiting in list(self._waiting.values()):
            if waiting.call == first.call and self._rounds_of(waiting.life) is rounds:
                self._waiting[waiting.request] = waiting._replace(round=waiting.round + late)
        self._order = sorted(self._waiting.values())

    def _has_room(self, life: Life, taken: _Taken) -> bool:
        """Whether a request fits beside what its group takes."""
        if taken.requests >= self.limits.max_num_seqs:
            return False
        if life.pages:
            return life.pages <= self.free_pages and not self._takers
        return not taken.requests or taken.rows + life.rows <= self.limits.whole_rows

    def _leaves_room(self, life: Life, group: _Group, taken: _Taken) -> bool:
        """Whether a call leaves room for other calls of a group, where it starts a request beside `taken`."""
        if group not in (_PAGES, _HELD) or not self.limits.shared or not taken.requests:
            return True
        return (
            taken.requests + 1 <= CALL_SHARE * self.limits.max_num_seqs
            and taken.pages + life.pages <= CALL_SHARE * self.limits.pages
            and (group == _PAGES or taken.rows + life.rows <= CALL_SHARE * self.limits.whole_rows)
        )

    def _rounds_of(self, life: Life) -> Rounds | None:
        """The rounds in which calls take part that need the same."""
        if life.pages or self._takes_pool(life):
            return self._rounds[_PAGES]
        return self._rounds[_HELD] if life.holds else None

    def _pool_is_free(self, life: Life) -> bool:
        """Whether a request may take the room of the pool now, which requests share whose steps take it."""
        return _PAGES not in self._taken and not (self._takers if life.alone else self._alone)

    def _takes_pool(self, life: Life) -> bool:
        return life.alone or (life.pages == 0 and life.rows > self.limits.beside_pool)


def _group(life: Life, call: int) -> _Group:
    if life.pages:
        return _PAGES
    return _HELD if life.holds else call
