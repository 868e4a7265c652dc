"""Which requests run next: a count of rows, pages and turns, without tokens or arrays.

**Admission** looks ahead. A request starts when the pages of its whole life are free, so that nobody is ever
preempted and nobody who runs can lack memory. Requests with pages start in the order of their arrival, and so
do requests without: neither waits for what the other lacks. A request that takes the room of the pool needs
both, so it passes nobody, and nobody passes it.

**Turns.** Among the ready requests whose kind is not in flight, the one that was served least recently has
the first pick; ties go to the earlier admission. Reuses and decodes are cheap and pick next, the others after
them, each in the order of turns. Who does not fit what is left is passed over, but not for ever:

- Where the first pick does not fit beside what is in flight, nobody is served until it does. Every plan
  therefore serves the first pick, or waits for one of at most seven parts of other kinds. A request that n
  running requests precede in turn is served within 8 (n + 1) plans in which it is ready and its kind is not
  busy. A second plan that serves nobody before a part has ended is not counted.
- Refreshes that are due at once are spread over several iterations. Two iterations in a row serve more rows
  than one has room for, because the first refresh that an iteration passes over is the first that the next
  one serves. Where each iteration has room for L rows of refreshes and none of them is longer, a refresh is
  served after at most ceil(2 D / L) iterations: D is its rows and those of all that precede it. Where a limit
  on head rows is reached too, the same quotient for head rows is added to 2 D / L.
- Requests that are out of step with others are served by executables that they fill: a part ends where it
  leaves the smallest share of one empty, but not before half of its rows. Then 4 D / L takes the place of
  2 D / L above.
"""

import dataclasses
import enum
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jdllm.errors import RequestError


class Kind(enum.IntEnum):
    """What a part of an iteration runs; each kind is an executable of its own."""

    FULL = 0
    """Whole sequences, nothing stored."""
    REFRESH = 1
    """Whole sequences, whose keys and values are stored."""
    REUSE = 2
    """Only the forwarded positions, against stored keys and values."""
    ADAPTIVE = 3
    """A draft and its verification."""
    STAGE = 4
    """A stage of one long context, before its answer is denoised or between two blocks of it."""
    PREFILL = 5
    """Parts of prompts of a causal model, which are stored."""
    DECODE = 6
    """The last token of each sequence of a causal model, against stored keys and values."""
    LAYERED = 7
    """Some layers of one sequence of a causal model, or its last token; its keys do not fit the pool."""


SUBMITTED = (
    Kind.REUSE,
    Kind.DECODE,
    Kind.REFRESH,
    Kind.FULL,
    Kind.ADAPTIVE,
    Kind.STAGE,
    Kind.PREFILL,
    Kind.LAYERED,
)
"""The order of the parts of an iteration: the host prepares the next reuse while the others run."""

_CHEAP = (Kind.REUSE, Kind.DECODE)
_WHOLE = (Kind.FULL, Kind.ADAPTIVE)

COMPANY_ROWS = 2048
"""Rows from which on whole sequences are about as quick in turn as together."""


class Life(NamedTuple):
    """What a request needs at most, over its whole life.

    - `rows`: packed rows of its largest step.
    - `pages`: pages of the KV pool, 0 without a cache.
    """

    rows: int
    pages: int


class Demand(NamedTuple):
    """What the next step of a request takes.

    - `kind`: the executable that runs it.
    - `rows`: packed rows.
    - `head_rows`: rows that meet the head.
    - `entries`: entries of the page table, 0 for what reads nothing that is stored.
    - `steps`: steps of this kind that the request does before another kind is due.
    """

    kind: Kind
    rows: int
    head_rows: int
    entries: int
    steps: int = 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the engine has room for.

    - `max_num_batched_tokens`: packed rows of one iteration, all its parts together.
    - `max_num_seqs`: running requests with pages, and running requests without, hence also the requests of
      one part.
    - `max_num_logits`: head rows of one part.
    - `entries`: page table entries of one part.
    - `reuse_rows`: packed rows of one part that reuses.
    - `pages`: pages that requests may hold in all, the scratch page excluded.
    - `longest`: packed rows of a request that runs alone, at least `max_num_batched_tokens`;
      `longest_refresh` of one with pages.
    - `beside_pool`: packed rows up to which a request without pages runs while others hold some; a longer one
      takes the room of the pool.
    - `uncached_rows`: packed rows of all requests that run without pages; a longer one runs alone.
    - `sizes`: of kinds whose parts fill executables, the rows of these, in rising order.
    - `company_rows`: packed rows of one part of requests without pages while others with pages run, who wait
      for each of these parts. One request may have more.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_logits: int
    entries: int
    reuse_rows: int
    pages: int
    longest: int
    longest_refresh: int
    beside_pool: int
    uncached_rows: int
    sizes: Mapping[Kind, Sequence[int]] = dataclasses.field(default_factory=dict)
    company_rows: int = COMPANY_ROWS


class Part(NamedTuple):
    """Requests that one executable serves together.

    - `ids`: in the order of their arrival.
    - `steps`: that the executable does at most before others have to be served.
    """

    kind: Kind
    ids: tuple[int, ...]
    steps: int = 1


class _Waiting(NamedTuple):
    """A request that waits, and its place in the order of arrival."""

    life: Life
    arrival: int


@dataclasses.dataclass(slots=True)
class _Running:
    """A running request: its places in the orders of arrival and of admission, and the number of the last
    plan that served it, or before the first the number of the last plan before its admission."""

    life: Life
    arrival: int
    admission: int
    served: int


@dataclasses.dataclass(slots=True)
class _Draft:
    """A part that is being filled."""

    ids: list[int] = dataclasses.field(default_factory=list)
    rows: int = 0
    head_rows: int = 0
    entries: int = 0

    def holds(self, demand: Demand, limits: Limits, whole_rows: int) -> bool:
        """Whether `demand` fits too. A part that is empty holds everything, one that prepares one request.

        Arguments:
        - `whole_rows`: rows of a part of whole sequences.
        """
        return not self.ids or (
            demand.kind is not Kind.STAGE
            and (demand.kind not in _WHOLE or self.rows + demand.rows <= whole_rows)
            and (demand.kind is not Kind.REUSE or self.rows + demand.rows <= limits.reuse_rows)
            and self.head_rows + demand.head_rows <= limits.max_num_logits
            and self.entries + demand.entries <= limits.entries
        )

    def add(self, request: int, demand: Demand) -> None:
        self.ids.append(request)
        self.rows += demand.rows
        self.head_rows += demand.head_rows
        self.entries += demand.entries


class Scheduler:
    """Decides who starts and who is served next, first come first served.

    Ids are the caller's; one that was added is not added again.

    Arguments:
    - `limits`: what the engine has room for.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._waiting: dict[int, _Waiting] = {}
        self._running: dict[int, _Running] = {}
        self._free_pages = limits.pages
        self._uncached_rows = 0
        self._count = {True: 0, False: 0}
        self._arrivals = self._admissions = 0
        self._plans = 0

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def waiting(self) -> tuple[int, ...]:
        """Requests that have not started, in the order of their arrival. Any thread may ask."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[int, ...]:
        """Requests that have started, in the order of their arrival. Any thread may ask."""
        running = list(self._running.items())  # at once: the engine's thread may remove one
        return tuple(request for request, _ in sorted(running, key=lambda item: item[1].arrival))

    @property
    def free_pages(self) -> int:
        """Pages that no running request holds."""
        return self._free_pages

    def add(self, request: int, life: Life) -> None:
        """Let `request` wait behind all others; raises what `check` raises.

        Arguments:
        - `request`: its id.
        - `life`: its largest needs.
        """
        self.check(life)
        self._waiting[request] = _Waiting(life, self._arrivals)
        self._arrivals += 1

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

    def remove(self, request: int) -> None:
        """Forget `request`, waiting or running, and free its pages. It may be in flight."""
        if request in self._waiting:
            del self._waiting[request]
            return
        life = self._running.pop(request).life
        self._free_pages += life.pages
        self._uncached_rows -= _uncached_rows(life)
        self._count[life.pages > 0] -= 1

    def admit(self) -> list[int]:
        """Start the requests that have waited longest, with pages up to the first that does not fit, and
        without pages up to the first of these.

        A request fits where fewer than `max_num_seqs` run with pages, or without as it does, and its pages
        are free. All that run without pages have at most `uncached_rows` together, unless one of them is
        longer and the only one. One that takes the room of the pool runs while nobody holds pages, and nobody
        gets any while it runs.

        Returns those that now run, in the order of their arrival.
        """
        admitted, waits = [], {True: False, False: False}
        for request, (life, arrival) in self._waiting.items():
            queues = (True, False) if self._takes_pool(life) else (life.pages > 0,)
            if any(waits[queue] for queue in queues) or not self._has_room(life):
                waits |= dict.fromkeys(queues, True)
                continue
            self._running[request] = _Running(life, arrival, self._admissions, self._plans)
            self._admissions += 1
            self._free_pages -= life.pages
            self._uncached_rows += _uncached_rows(life)
            self._count[life.pages > 0] += 1
            admitted.append(request)
        for request in admitted:
            del self._waiting[request]
        return admitted

    def _has_room(self, life: Life) -> bool:
        rows = self._uncached_rows + _uncached_rows(life)
        return (
            self._count[life.pages > 0] < self._limits.max_num_seqs
            and life.pages <= self._free_pages
            and (life.pages > 0 or not self._uncached_rows or rows <= self._limits.uncached_rows)
            and not (self._takes_pool(life) and self._free_pages < self._limits.pages)
            and not (life.pages and any(self._takes_pool(other.life) for other in self._running.values()))
        )

    def _takes_pool(self, life: Life) -> bool:
        return life.pages == 0 and life.rows > self._limits.beside_pool

    def plan(
        self, ready: Mapping[int, Demand], busy: Collection[Kind] = (), in_flight_rows: int = 0
    ) -> list[Part]:
        """Choose the parts that are submitted next.

        Arguments:
        - `ready`: the next step of each running request that is not in flight.
        - `busy`: kinds of which a part is in flight. They get no other: requests that are one step apart
          would else stay apart for ever.
        - `in_flight_rows`: rows of the parts in flight.

        Returns at most one part of each kind, in the order of `SUBMITTED`. Together with what is in flight
        they have at most `max_num_batched_tokens` rows, except that a longer request is served when nothing
        else is in flight, and then alone. One that takes more than a part has is alone in it.
        """
        self._plans += 1
        turns = sorted(
            (request for request, demand in ready.items() if demand.kind not in busy), key=self._turn
        )
        left = self._limits.max_num_batched_tokens - in_flight_rows
        if not turns or (busy and ready[turns[0]].rows > left):
            return []
        first, *others = turns
        others.sort(key=lambda request: ready[request].kind not in _CHEAP)
        drafts = {kind: _Draft() for kind in SUBMITTED}
        limits = self._limits
        whole_rows = limits.company_rows if self._count[True] else limits.max_num_batched_tokens
        for request in (first, *others):
            demand = ready[request]
            draft = drafts[demand.kind]
            if request == first or (demand.rows <= left and draft.holds(demand, limits, whole_rows)):
                draft.add(request, demand)
                left -= demand.rows
        return [
            self._serve(kind, self._filling(draft, ready), ready)
            for kind, draft in drafts.items()
            if draft.ids
        ]

    def _filling(self, draft: _Draft, ready: Mapping[int, Demand]) -> list[int]:
        """The requests of a part up to where it fills an executable best; all where they are in step."""
        ids, sizes = draft.ids, self._limits.sizes.get(ready[draft.ids[0]].kind, ())
        if not sizes or len(ids) == len(self._running):
            return ids
        reached = list(itertools.accumulate(ready[request].rows for request in ids))

        def filled(rows: int) -> tuple[float, int]:
            return rows / next((size for size in sizes if size >= rows), rows), rows

        best = max((rows for rows in reached if 2 * rows >= draft.rows), key=filled)
        return ids[: reached.index(best) + 1]

    def _arrival(self, request: int) -> int:
        return self._running[request].arrival

    def _turn(self, request: int) -> tuple[int, int]:
        running = self._running[request]
        return running.served, running.admission

    def _serve(self, kind: Kind, ids: list[int], ready: Mapping[int, Demand]) -> Part:
        for request in ids:
            self._running[request].served = self._plans
        return Part(kind, tuple(sorted(ids, key=self._arrival)), self._steps(kind, [ready[i] for i in ids]))

    def _steps(self, kind: Kind, demands: Sequence[Demand]) -> int:
        """Steps of a part: one beside requests that the part does not serve. They would join it later: on a
        busy device this costs more than the host's time between two steps. A decode goes on where some of its
        requests have ended."""
        if len(demands) < len(self._running):
            return 1
        left = [demand.steps for demand in demands]
        return max(left) if kind is Kind.DECODE else min(left)


def _uncached_rows(life: Life) -> int:
    """Rows that count towards the limit of all requests without a cache."""
    return 0 if life.pages else life.rows
