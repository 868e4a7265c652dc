"""Which requests run next: a count of rows, pages and turns, without tokens or arrays.

**Admission** (`jdllm.serving.admission`) looks ahead. A request starts when the pages of its whole life are
free, so that nobody is ever preempted and nobody who runs can lack memory. Requests with pages wait for each
other, because they need the same. So do those that hold other memory. Requests that hold nothing wait for
earlier ones of their own call only. A request that takes the room of the pool waits for pages too: it passes
nobody with pages, and none of these passes it.

Calls that need the same take part in rounds, with one request each: nobody waits for all of a call of a
thousand requests. Calls of one request start in the order of their arrival. Requests of a lower priority
number start first, and are served first: all of this, and all bounds, are among requests of one priority.

Where clients share the engine (`Limits.shared`), the running requests of a call that have pages, or that hold
other memory, take at most seven eighths of the room, or are one request. A call that has its share waits for
its own requests only. Others pass it, and it gains no turns meanwhile. Where one call of many requests fills
its share and nobody else runs, a request of another call that fits an eighth of the room starts at once.
Beside several calls it waits, in its turn, until one of their requests has ended. A part of several steps
takes about half a second at most: who comes meanwhile waits for it.

**Turns.** Among the ready requests whose kind is not in flight, the one that was served least recently has
the first pick; ties go to the earlier admission. Reuses and decodes are cheap and pick next, the others after
them, each in the order of turns. Who does not fit what is left is passed over, but not for ever:

- Where the first pick does not fit beside what is in flight, nobody is served until it does. Every plan
  therefore serves the first pick, or waits for one of at most eight parts of other kinds. A request that n
  running requests precede in turn is served within 9 (n + 1) plans in which it is ready and its kind is not
  busy. A second plan that serves nobody before a part has ended is not counted.
- Refreshes that are due at once are spread over several iterations. Two iterations in a row serve more rows
  than one has room for, because the first refresh that an iteration passes over is the first that the next
  one serves. Where each iteration has room for L rows of refreshes and none of them is longer, a refresh is
  served after at most ceil(2 D / L) iterations: D is its rows and those of all that precede it. Where a limit
  on head rows is reached too, the same quotient for head rows is added to 2 D / L.
- Requests that are out of step with others are served by executables that they fill: a part ends where it
  leaves the smallest share of one empty, but not before half of its rows. Then 4 D / L takes the place of
  2 D / L above.
- Requests without pages have one turn together; who has pages precedes them in a tie. A plan that cannot
  serve the first of them serves none of them, so their turn is bound as others' turns are. The first is of
  the call that has had least of the device (`jdllm.serving.shares`), and within the call the one that was
  served least recently. Others join its part, but no request of another call with more than 4 times its rows.
- While another call has had less, with pages or without, requests without pages are not served: a short
  request pays neither for the steps nor for the rows of long ones. Where n calls run, and their longest part
  takes P seconds, a call of such requests is overdue, and comes before all these, once the calls have had
  4 n P seconds of the device since its last part.

**Long refreshes** are cut by layers into parts of a kind of their own. Between two such parts hidden rows of
one request are held (`Held`). Refreshes and reuses that leave room for these rows run meanwhile. Other
requests, long refreshes among them, are not ready until the last of these parts is on its way. A plan begins
at most one long refresh, so a request that waits for n plans waits for at most n long refreshes of others.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

from jdllm.serving.admission import Admission
from jdllm.serving.demands import (
    CHEAP,
    HOST_SECONDS,
    PART_SECONDS,
    SUBMITTED,
    Demand,
    Held,
    Kind,
    Life,
    Limits,
    Part,
)
from jdllm.serving.pace import Pace
from jdllm.serving.shares import Caller, Turns

_WHOLE = (Kind.FULL, Kind.ADAPTIVE)
_IN_WHOLE_ROWS = (*_WHOLE, Kind.ADAPTIVE_REFRESH)
_TILED = (Kind.REUSE, Kind.ADAPTIVE_REUSE)
_ALONE = (Kind.STAGE, Kind.LAYERS)
_BESIDE_HELD = (Kind.REFRESH, Kind.REUSE)
_LONGER = 4
"""By which factor a whole sequence may be longer than the first of its part, if that is another call's."""


@dataclasses.dataclass(slots=True)
class _Running:
    """A running request: its places in the orders of arrival and of admission, the number of the last plan
    that served it, or before the first the number of the last plan before its admission, and the rows that it
    had in its last part of each kind."""

    life: Life
    caller: Caller
    arrival: int
    admission: int
    served: int
    rows: dict[Kind, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _Draft:
    """A part that is being filled."""

    ids: list[int] = dataclasses.field(default_factory=list)
    rows: int = 0
    head_rows: int = 0
    entries: int = 0
    verified: int = 0

    def holds(self, demand: Demand, limits: Limits, whole_rows: int) -> bool:
        """Whether `demand` fits too. A part that is empty holds everything. A part that prepares, or that has
        some layers, holds one request.

        Arguments:
        - `whole_rows`: rows of a part of whole sequences.
        """
        return not self.ids or (
            demand.kind not in _ALONE
            and (demand.kind not in _IN_WHOLE_ROWS or self.rows + demand.rows <= whole_rows)
            and (demand.kind not in _TILED or self.rows + demand.rows <= limits.reuse_rows)
            and len(self.ids) < limits.max_num_seqs
            and self.head_rows + demand.head_rows <= limits.max_num_logits
            and self.entries + demand.entries <= limits.entries
            and self.verified + demand.verified <= limits.max_num_batched_tokens
        )

    def add(self, request: int, demand: Demand) -> None:
        self.ids.append(request)
        self.rows += demand.rows
        self.head_rows += demand.head_rows
        self.entries += demand.entries
        self.verified += demand.verified


@dataclasses.dataclass(slots=True)
class _Left:
    """Rows that a plan may still give: in all, and beside what is held, which the holder's own part has."""

    rows: int
    beside: int

    def holds(self, demand: Demand) -> bool:
        return demand.rows <= self.rows and (demand.kind is Kind.LAYERS or demand.rows <= self.beside)

    def take(self, demand: Demand) -> None:
        self.rows -= demand.rows
        if demand.kind is not Kind.LAYERS:
            self.beside -= demand.rows


class Scheduler:
    """Decides who starts and who is served next, first come first served.

    Ids are the caller's; one that was added is not added again.

    Arguments:
    - `limits`: what the engine has room for.
    """

    def __init__(self, limits: Limits):
        self._admission = Admission(limits)
        self._running: dict[int, _Running] = {}
        self._calls = Turns()
        self._pace = Pace()
        self._served_without_pages = 0
        self._admissions = self._plans = 0

    @property
    def limits(self) -> Limits:
        return self._admission.limits

    def share(self) -> None:
        """Say that clients share the engine from now on: see `Limits.shared`.

        Raises as `Limits.check_alone` does.
        """
        self.limits.check_alone()
        self._admission.limits = dataclasses.replace(self.limits, shared=True)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Requests that have not started, in the order of their arrival. Any thread may ask."""
        return self._admission.waiting

    @property
    def running(self) -> tuple[int, ...]:
        """Requests that have started, in the order of their arrival. Any thread may ask."""
        running = list(self._running.items())  # at once: the engine's thread may remove one
        return tuple(request for request, _ in sorted(running, key=lambda item: item[1].arrival))

    @property
    def free_pages(self) -> int:
        """Pages that no running request holds."""
        return self._admission.free_pages

    def check(self, life: Life) -> None:
        """Raise `RequestError` for a request that could not run even alone. Any thread may ask."""
        self._admission.check(life)

    def add(self, request: int, life: Life, call: int | None = None, priority: int = 0) -> None:
        """Let `request` wait behind all others of its priority; raises what `check` raises.

        Arguments:
        - `request`: its id.
        - `life`: its largest needs.
        - `call`: any number; requests of the same number share its turns. By default the request's own id.
        - `priority`: the lowest is served first.
        """
        self.check(life)
        self._admission.add(request, life, Caller(priority, request if call is None else call))

    def remove(self, request: int) -> None:
        """Forget `request`, waiting or running, and free its pages. It may be in flight."""
        if request in self._admission:
            self._admission.remove(request)
            return
        running = self._running.pop(request)
        self._admission.release(running.life, running.caller.call)
        self._calls.leave(running.caller)

    def admit(self) -> list[int]:
        """Start the requests that have waited longest, as far as there is room.

        Requests with pages start up to the first whose pages are not free. At most `max_num_seqs` of them
        run. Requests that hold nothing start up to the first that goes beyond `whole_rows` or `max_num_seqs`
        of its call's running ones, or is longer and not the only one. Those that hold other memory start as
        if all were one call's. Where clients share the engine, those of a call with pages or other memory
        start up to the first that goes beyond the call's share and is not the only one; other calls pass it.
        One that takes the room of the pool runs while nobody holds pages, and nobody gets any while it runs.

        Returns those that now run, in the order in which they start.
        """
        if not self._admission.without_pages:
            self._served_without_pages = self._plans
        admitted = self._admission.admit()
        for priority, _, arrival, request, life, call in admitted:
            caller = Caller(priority, call)
            self._running[request] = _Running(life, caller, arrival, self._admissions, self._plans)
            self._admissions += 1
            self._calls.join(caller)
        return [waiting.request for waiting in admitted]

    def charge(self, part: Part, seconds: float, *, woke: bool = False) -> None:
        """Take in what a part had of the device.

        Arguments:
        - `part`: with the steps that it did. Requests that have left count as nobody's.
        - `seconds`: that the part took, which its requests share by their rows. In step with others its rows
          count instead.
        - `woke`: whether the device was idle before. Then the part waited for the host to launch it.
        """
        running = [self._running[request] for request in part.ids if request in self._running]
        rows, shares = sum(one.rows[part.kind] for one in running), dict[Caller, float]()
        if self.limits.in_step:
            seconds = float(rows * part.steps)
        for one in running:
            shares[one.caller] = shares.get(one.caller, 0.0) + seconds * one.rows[part.kind] / rows
        self._calls.charge(shares)
        self._pace.learn(part.kind, rows, seconds / max(1, part.steps), woke=woke)

    def plan(
        self,
        ready: Mapping[int, Demand],
        busy: Collection[Kind] = (),
        in_flight_rows: int = 0,
        held: Held | None = None,
    ) -> list[Part]:
        """Choose the parts that are submitted next.

        Arguments:
        - `ready`: the next step of each running request that is not in flight, and the step behind that in
          flight of those that go ahead.
        - `busy`: kinds of which a part is in flight. They get no other: requests that are one step apart
          would else stay apart for ever. Reuses and decodes are not among them where requests go ahead.
        - `in_flight_rows`: rows of the parts in flight.
        - `held`: what is held for a request between two parts.

        Returns at most one part of each kind, in the order of `SUBMITTED`. Together with what is in flight
        they have at most `max_num_batched_tokens` rows, except that a longer request is served when nothing
        else is in flight, and then alone. One that takes more than a part has is alone in it.
        """
        self._plans += 1
        most = self.limits.max_num_batched_tokens
        left = _Left(most - in_flight_rows, most - (held.rows if held else 0))
        able = (request for request, demand in ready.items() if demand.kind not in busy)
        turns = self._turns([i for i in able if held is None or _runs_beside(held, i, ready[i], left)], busy)
        if not turns or (busy and not left.holds(ready[turns[0]])):
            return []
        first, *others = turns
        others.sort(key=lambda request: ready[request].kind not in CHEAP)
        drafts = {kind: _Draft() for kind in SUBMITTED}
        limits = self.limits
        whole_rows = limits.whole_rows if len(self._calls) == 1 else limits.company_rows
        first_without_pages, passed = self._first_without_pages(turns), set[int]()
        for request in (first, *others):
            demand = ready[request]
            draft = drafts[demand.kind]
            if request == first or (
                left.holds(demand)
                and draft.holds(demand, limits, whole_rows)
                and self._joins(request, draft, ready)
                and (self._has_pages(request) or first_without_pages not in passed)
            ):
                draft.add(request, demand)
                left.take(demand)
            else:
                passed.add(request)
        return [
            self._serve(kind, self._filling(draft, ready), ready)
            for kind, draft in drafts.items()
            if draft.ids
        ]

    def pays_ahead(self, demands: Collection[Demand]) -> bool:
        """Whether a part is submitted before the results of the part before it are there.

        A decode is, and a step that also stores finished blocks. So is a single step that reuses, where
        clients share the engine, and where such a step is known to take the device longer than the host takes
        between two parts. Shorter steps are done several in a part.

        Arguments:
        - `demands`: of the part, all of one kind.
        """
        if any(demand.kind is Kind.DECODE or demand.stores for demand in demands):
            return True
        rows = sum(demand.rows for demand in demands)
        return self.limits.shared and self._pace.takes(Kind.REUSE, rows, HOST_SECONDS)

    def _turns(self, candidates: Sequence[int], busy: Collection[Kind]) -> list[int]:
        """The order of those that may be served now.

        Requests without pages are left out while another call runs that has had less: a part that evaluates
        whole sequences would be a step that the requests of this call wait for.
        """
        turns = sorted(candidates, key=self._turn)
        first = self._first_without_pages(turns)
        if first is None or self._calls.is_first(self._running[first].caller):
            return turns
        others = [request for request in turns if self._has_pages(request)]
        return others if others or busy else turns

    def _first_without_pages(self, turns: Sequence[int]) -> int | None:
        return next((request for request in turns if not self._has_pages(request)), None)

    def _has_pages(self, request: int) -> bool:
        return self._running[request].life.pages > 0

    def _joins(self, request: int, draft: _Draft, ready: Mapping[int, Demand]) -> bool:
        """Whether the first of a part need not mind the length of `request`."""
        if not draft.ids or ready[request].kind not in _WHOLE:
            return True
        first = draft.ids[0]
        same_call = self._running[request].caller.call == self._running[first].caller.call
        return same_call or ready[request].rows <= _LONGER * ready[first].rows

    def _filling(self, draft: _Draft, ready: Mapping[int, Demand]) -> list[int]:
        """The requests of a part up to where it fills an executable best; all where they are in step."""
        ids, sizes = draft.ids, self.limits.sizes.get(ready[draft.ids[0]].kind, ())
        if not sizes or len(ids) == len(self._running):
            return ids
        reached = list(itertools.accumulate(ready[request].rows for request in ids))

        def filled(rows: int) -> tuple[float, int]:
            return rows / next((size for size in sizes if size >= rows), rows), rows

        best = max((rows for rows in reached if 2 * rows >= draft.rows), key=filled)
        return ids[: reached.index(best) + 1]

    def _arrival(self, request: int) -> int:
        return self._running[request].arrival

    def _turn(self, request: int) -> tuple[int | float, ...]:
        running = self._running[request]
        priority, own = running.caller.priority, (running.served, running.admission)
        if self._has_pages(request):
            return priority, running.served, False, *own
        return priority, self._served_without_pages, True, *self._calls.place(running.caller), *own

    def _serve(self, kind: Kind, ids: list[int], ready: Mapping[int, Demand]) -> Part:
        ids = sorted(ids, key=self._arrival)
        for request in ids:
            running = self._running[request]
            running.served, running.rows[kind] = self._plans, ready[request].rows
            if not self._has_pages(request):
                self._served_without_pages = self._plans
        return Part(kind, tuple(ids), self._steps(kind, [ready[i] for i in ids]))

    def _steps(self, kind: Kind, demands: Sequence[Demand]) -> int:
        """Steps of a part: one beside requests that the part does not serve. They would join it later: on a
        busy device this costs more than the host's time between two steps. A decode goes on where some of its
        requests have ended. Nobody can join a part, so it is short where clients share the engine: one step
        where the next one can be submitted meanwhile."""
        if len(demands) < len(self._running) or (all(d.ahead for d in demands) and self.pays_ahead(demands)):
            return 1
        left = [demand.steps for demand in demands]
        most = max(left) if kind is Kind.DECODE else min(left)
        if not self.limits.shared:
            return most
        return min(most, self._pace.steps(kind, sum(demand.rows for demand in demands), PART_SECONDS))


def _runs_beside(held: Held, request: int, demand: Demand, left: _Left) -> bool:
    """Whether a step may run while something is held. A whole sequence without pages may take all the memory
    that a step has, however short it is; so may a stage."""
    return request == held.request or (demand.kind in _BESIDE_HELD and demand.rows <= left.beside)
