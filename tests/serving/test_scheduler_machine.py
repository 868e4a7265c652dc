"""The scheduler under random arrivals, aborts and failures, against counters of the test's own."""

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jdllm.errors import RequestError
from jdllm.serving.demands import SUBMITTED, Demand, Held, Kind, Life, Limits, Part
from jdllm.serving.scheduler import Scheduler
from tests.serving.in_flight import InFlight
from tests.serving.ledger import Ledger
from tests.serving.room import Room
from tests.serving.scripts import SCRIPTS, Script, some_limits

OTHER_KINDS = len(Kind) - 1
MOST_WAITING, FEWEST_FOR_ABORT = 6, 4
TICKS, HALF = 1024, Fraction(1, 2)
"""Ticks of the test's clock in a second, and the seconds that a part of several steps takes at most."""


class Arrivals(RuleBasedStateMachine):
    """An engine that runs nothing: it plays scripts, and parts end in the order of their submission."""

    operations: ClassVar[int] = 0
    """What rules did in all examples: arrivals, aborts, admissions, plans, parts that ended or failed."""

    @initialize(limits=some_limits(), goes_ahead=st.booleans())
    def start(self, limits: Limits, goes_ahead: bool):
        self.limits, self.scheduler, self.arrivals = limits, Scheduler(limits), itertools.count()
        self.arrived: dict[int, int] = {}
        self.priorities: set[int] = set()
        self.admitted: dict[int, int] = {}
        self.scripts: dict[int, Script] = {}
        self.waiting: deque[int] = deque()
        self.steps_done: dict[int, int] = {}
        self.in_flight = InFlight(self.scripts, self.steps_done, goes_ahead)
        self.plans = self.last_plan_without_pages = self.count = 0
        self.last_plan: dict[int, int] = {}
        self.ledger, self.room, self.stalled = Ledger(), Room(limits), False
        self.last_rows: dict[tuple[int, Kind], int] = {}
        self.step_seconds: dict[Kind, list[Fraction]] = {}
        self.waited: dict[int, int] = {}
        self.bound: dict[int, int] = {}
        self.waited_without_pages = self.bound_without_pages = 0
        self.held: Held | None = None

    # What the test knows by its own counting.

    @property
    def running(self) -> list[int]:
        return sorted(self.steps_done, key=self.arrived.__getitem__)

    def has_pages(self, request: int) -> bool:
        return self.scripts[request].life.pages > 0

    def turn(self, request: int) -> tuple[int | bool, ...]:
        """Requests without pages have one turn together."""
        own, priority = (self.last_plan[request], self.admitted[request]), self.scripts[request].priority
        if self.has_pages(request):
            return priority, own[0], False, False, 0, *own
        call = self.scripts[request].call
        return priority, self.last_plan_without_pages, True, *self.ledger.place(call), *own

    def running_scripts(self) -> list[Script]:
        return [self.scripts[request] for request in self.steps_done]

    def fits_plan(self, demand: Demand, before: Collection[Demand], in_flight: int) -> bool:
        """Whether `demand` fits beside so many rows in flight and what is `before` it."""
        part = [other for other in before if other.kind is demand.kind]
        rows = in_flight + sum(other.rows for other in before) + demand.rows
        fits = rows <= self.limits.max_num_batched_tokens and self.leave_room([*before, demand], demand)
        return fits and (not part or self.one_part([*part, demand]))

    def leave_room(self, demands: Iterable[Demand], last: Demand) -> bool:
        """Whether steps leave room for what is held, whose owner's own parts need no more."""
        rows = [demand.rows for demand in demands if demand.kind is not Kind.LAYERS]
        held = self.held.rows if self.held else 0
        return last.kind is Kind.LAYERS or held + sum(rows) <= self.limits.max_num_batched_tokens

    def one_part(self, demands: Sequence[Demand]) -> bool:
        whole, tiled = {Kind.FULL, Kind.ADAPTIVE, Kind.ADAPTIVE_REFRESH}, {Kind.REUSE, Kind.ADAPTIVE_REUSE}
        kinds, rows, head_rows, entries, *_ = zip(*demands, strict=True)
        whole_rows = self.limits.whole_rows if len(self.ledger) == 1 else self.limits.company_rows
        return (
            not {Kind.STAGE, Kind.LAYERS}.intersection(kinds)
            and len(kinds) <= self.limits.max_num_seqs
            and sum(head_rows) <= self.limits.max_num_logits
            and sum(entries) <= self.limits.entries
            and (not tiled.intersection(kinds) or sum(rows) <= self.limits.reuse_rows)
            and (not whole.intersection(kinds) or sum(rows) <= whole_rows)
            and sum(demand.verified for demand in demands) <= self.limits.max_num_batched_tokens
        )

    def forget(self, request: int) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            del self.steps_done[request]
            call = self.scripts[request].call
            if all(self.scripts[other].call != call for other in self.steps_done):
                self.ledger.end(call)
        self.scheduler.remove(request)

    def becomes_ready(self, request: int) -> None:
        """From here on the bound that the module states holds."""
        before = sum(self.turn(other) < self.turn(request) for other in self.steps_done)
        self.waited[request], self.bound[request] = 0, (OTHER_KINDS + 1) * (before + 1)

    def may_be_passed(self, request: int) -> bool:
        """Whether there were others of a higher priority: bounds are among requests of one priority."""
        return self.scripts[request].priority > min(self.priorities)

    def turn_without_pages_begins(self) -> None:
        """As `becomes_ready`, for the turn that requests without pages have together."""
        self.waited_without_pages = 0
        self.bound_without_pages = (OTHER_KINDS + 1) * (len(self.steps_done) + 1)

    @precondition(lambda self: len(self.waiting) < MOST_WAITING)
    @rule(
        scripts=st.lists(SCRIPTS, min_size=1, max_size=6),
        together=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
    )
    def arrive(self, scripts: list[Script], together: bool, priority: int):
        first = self.count + 1
        for script in scripts:
            self.add(script._replace(call=first if together else self.count + 1, priority=priority))
        self.priorities.add(priority)

    def add(self, script: Script) -> None:
        self.count += 1
        arrival = next(self.arrivals)
        request = -arrival
        self.arrived[request], self.scripts[request] = arrival, script
        longest = self.limits.longest_refresh if script.life.pages else self.limits.longest
        longest = max(longest, script.life.rows) if script.life.alone else longest
        try:
            self.scheduler.add(request, script.life, script.call, script.priority)
        except RequestError:
            assert script.life.pages > self.limits.pages or script.life.rows > longest
        else:
            assert script.life.pages <= self.limits.pages
            assert script.life.rows <= longest
            self.waiting.append(request)

    @precondition(lambda self: len(self.steps_done) + len(self.waiting) >= FEWEST_FOR_ABORT)
    @rule(data=st.data())
    def abort(self, data: st.DataObject):
        self.count += 1
        self.forget(data.draw(st.sampled_from([*self.waiting, *self.running])))

    @precondition(lambda self: self.waiting or self.steps_done)
    @rule(parts=st.integers(0, 3), ticks=st.integers(1, 9))
    def iterate(self, parts: int, ticks: int):
        """What an engine does in every iteration."""
        self.admit()
        self.plan()
        for _ in range(min(parts, len(self.in_flight))):
            self.end(ticks)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self):
        self.count += 1
        for request in self.scheduler.admit():
            script, place = self.scripts[request], self.waiting.index(request)
            before = [self.scripts[other] for other in itertools.islice(self.waiting, place)]
            needs = self.room.needs
            assert not any(other.call == script.call and needs(other) == needs(script) for other in before)
            self.waiting.remove(request)
            assert self.room.fits(script, self.running_scripts())
            if not self.has_pages(request) and all(map(self.has_pages, self.steps_done)):
                self.last_plan_without_pages = self.plans
                self.turn_without_pages_begins()
            if script.call not in self.ledger:
                self.ledger.begin(script.call, script.priority)
            self.steps_done[request] = 0
            self.last_plan[request], self.admitted[request] = self.plans, len(self.admitted)
            self.becomes_ready(request)
        self.check_who_waits([self.scripts[request] for request in self.waiting], self.running_scripts())

    def check_who_waits(self, waiting: list[Script], running: list[Script]) -> None:
        """Who waits has no room, or waits for others; not for those of another call that has its share."""
        for script in waiting:
            assert not self.room.fits(script, running) or any(
                self.room.stands_before(other, script)
                and (other.call == script.call or not self.room.has_its_share(other, running))
                for other in waiting
                if other is not script
            )

    @precondition(lambda self: self.steps_done)
    @rule()
    def plan(self):
        self.count += 1
        flight = self.in_flight
        ready, busy, rows, ahead = flight.ready(), flight.busy, flight.rows, flight.ahead()
        self.held = flight.held()
        if ahead:  # the next iteration begins
            ready, busy, rows = ready | ahead, busy - {Kind.REUSE}, 0
        parts = self.scheduler.plan(ready, busy, rows, self.held)
        served = {request: ready[request] for part in parts for request in part.ids}
        candidates = self.candidates(ready, busy)
        self.check_parts(parts, ready, busy)
        self.check_choice(served, candidates, rows)
        self.plans += 1
        for request, demand in served.items():
            self.last_plan[request], self.last_rows[request, demand.kind] = self.plans, demand.rows
            if not self.has_pages(request):
                self.last_plan_without_pages = self.plans
        if any(not self.has_pages(request) for request in candidates.keys() - served.keys()) and all(
            map(self.has_pages, served)
        ):
            self.waited_without_pages += bool(served) or not self.stalled
            assert self.waited_without_pages <= self.bound_without_pages or len(self.priorities) > 1
        else:
            self.turn_without_pages_begins()
        for request in candidates if served or not self.stalled else ():
            self.waited[request] += self.has_pages(request)
            assert self.waited[request] <= self.bound[request] or self.may_be_passed(request)
        self.stalled = not served
        together = rows + sum(demand.rows for demand in served.values())
        alone = not rows and len(served) == 1
        assert not served or alone or together <= self.limits.max_num_batched_tokens
        for part in parts:
            submitted = part._replace(steps=1) if ahead.keys() & part.ids else part
            self.in_flight.add(submitted, sum(ready[r].rows for r in part.ids))

    def check_parts(self, parts: list[Part], ready: dict[int, Demand], busy: set[Kind]) -> None:
        kinds = [part.kind for part in parts]
        assert kinds == [kind for kind in SUBMITTED if kind in kinds]
        assert not busy.intersection(kinds)
        ids = [request for part in parts for request in part.ids]
        assert len(ids) == len(set(ids))
        for part in parts:
            assert {ready[request].kind for request in part.ids} == {part.kind}
            assert list(part.ids) == sorted(part.ids, key=self.arrived.__getitem__)
            assert len(part.ids) <= self.limits.max_num_seqs
            assert len(part.ids) == 1 or self.one_part([ready[request] for request in part.ids])
            self.check_steps(part, [ready[request] for request in part.ids])

    def check_steps(self, part: Part, demands: list[Demand]) -> None:
        """A part ends where one of its requests needs something else, and beside others after a step. Where
        clients share the engine, a part of several steps takes half a second at most, and about as
        much as the quickest and slowest steps of its kind let it take."""
        left = [demand.steps for demand in demands]
        most = max(left) if part.kind is Kind.DECODE else min(left)
        most = most if len(demands) == len(self.steps_done) else 1
        known = self.step_seconds.get(part.kind, [])
        if not self.limits.shared or most == 1:
            assert part.steps == most
        else:
            assert 1 <= part.steps <= most
            assert part.steps == 1 or part.steps * min(known) <= HALF
            assert part.steps in (1, most) or (part.steps + 1) * max(known) >= HALF

    def check_choice(self, served: dict[int, Demand], candidates: dict[int, Demand], in_flight: int) -> None:
        """The first pick is served or everybody waits for it; nobody else is left out who fits beside those
        that pick before, unless a part ends where it fills an executable."""
        if not candidates:
            return
        first = min(candidates, key=self.turn)
        if not served:
            assert self.in_flight
            assert not self.fits_plan(candidates[first], [], in_flight)
            return
        assert first in served

        def pick(request: int) -> tuple:
            cheap = candidates[request].kind in (Kind.REUSE, Kind.DECODE)
            return request != first, not cheap, self.turn(request)

        without_pages = sorted((r for r in candidates if not self.has_pages(r)), key=self.turn)
        assert not without_pages or without_pages[0] in served or served.keys().isdisjoint(without_pages)
        for request in candidates if not self.limits.sizes else ():
            before = [other for other in served if pick(other) < pick(request)]
            fits = self.fits_plan(candidates[request], [served[other] for other in before], in_flight)
            own = [other for other in before if served[other].kind is candidates[request].kind]
            if request in without_pages and own:
                fits = fits and self.may_join(request, min(own, key=self.turn), candidates)
            elif request in without_pages[1:]:
                fits = fits and without_pages[0] in served
            assert (request in served) == (fits or request == first)

    def may_join(self, request: int, first: int, demands: dict[int, Demand]) -> bool:
        """Whether a part without pages that begins with `first` has no fault with the length of `request`."""
        whole = demands[request].kind in (Kind.FULL, Kind.ADAPTIVE)
        short = demands[request].rows <= 4 * demands[first].rows
        return not whole or short or self.scripts[request].call == self.scripts[first].call

    def candidates(self, ready: dict[int, Demand], busy: set[Kind]) -> dict[int, Demand]:
        """Those that may be served: without pages only if the first has had least, or nobody else can be."""
        found = {r: d for r, d in ready.items() if d.kind not in busy and self.runs_beside_held(r, d)}
        without = sorted((r for r in found if not self.has_pages(r)), key=self.turn)
        waits = len(found) > len(without) or busy
        if without and waits and not self.ledger.goes_first(self.scripts[without[0]].call):
            return {r: demand for r, demand in found.items() if self.has_pages(r)}
        return found

    def runs_beside_held(self, request: int, demand: Demand) -> bool:
        small = demand.kind in (Kind.REFRESH, Kind.REUSE) and self.leave_room([demand], demand)
        return self.held is None or request == self.held.request or small

    def charge(self, part: Part, ticks: int) -> None:
        """The requests of a part share its time, in ticks that are whole for each row."""
        rows = {r: self.last_rows[r, part.kind] for r in part.ids if r in self.steps_done}
        taken = ticks * sum(rows.values())
        self.scheduler.charge(part, taken / TICKS)
        if rows:
            self.step_seconds.setdefault(part.kind, []).append(Fraction(taken, TICKS * part.steps))
        shares = Counter[int]()
        for request, own in rows.items():
            shares[self.scripts[request].call] += ticks * own
        self.ledger.charge(shares)

    @precondition(lambda self: self.in_flight)
    @rule(ticks=st.integers(1, 9))
    def end(self, ticks: int = 1):
        """The oldest part in flight ends; those of its requests that are still there have done a step."""
        self.count += 1
        part = self.in_flight.end()
        self.stalled = False
        self.charge(part, ticks)
        for request in part.ids:
            if request not in self.steps_done:
                continue
            self.steps_done[request] += min(
                part.steps, self.scripts[request].next(self.steps_done[request]).steps
            )
            if self.steps_done[request] == len(self.scripts[request].steps):
                self.forget(request)
            else:
                self.becomes_ready(request)

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self):
        """The oldest part in flight fails, and its requests with it."""
        self.count += 1
        part = self.in_flight.end()
        self.stalled = False
        for request in part.ids:
            if request in self.steps_done:
                self.forget(request)

    @invariant()
    def queues_and_pages_are_those_of_the_test(self):
        assert self.scheduler.waiting == tuple(self.waiting)
        assert self.scheduler.running == tuple(self.running)
        assert sum(map(self.has_pages, self.running)) <= self.limits.max_num_seqs
        held = sum(self.scripts[request].life.pages for request in self.running)
        assert self.scheduler.free_pages == self.limits.pages - held >= 0

    def teardown(self):
        """Whoever arrived finishes, and then everything is free."""
        if not hasattr(self, "scheduler"):
            return
        Arrivals.operations += self.count
        left = [
            len(self.scripts[r].steps) - self.steps_done.get(r, 0) for r in (*self.waiting, *self.running)
        ]
        for _ in range(sum(left) + len(self.in_flight)):
            self.admit()
            self.plan()
            if self.in_flight:
                self.end()
        assert not self.in_flight
        assert self.scheduler.waiting == self.scheduler.running == ()
        self.scheduler.add(1, Life(self.limits.longest_refresh, self.limits.pages))
        assert self.scheduler.admit() == [1]
        self.scheduler.remove(1)
        self.scheduler.add(2, Life(self.limits.longest, 0))
        assert self.scheduler.admit() == [2]


TestArrivals = Arrivals.TestCase
TestArrivals.settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.slow
def test_a_hundred_thousand_operations():
    Arrivals.operations = 0
    many = settings(max_examples=900, stateful_step_count=150, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(Arrivals, settings=many)
    assert Arrivals.operations >= 100_000
