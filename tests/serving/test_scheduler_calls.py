"""Calls that share the scheduler's admissions and the device."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from jdllm.errors import ConfigError
from jdllm.serving.async_engine import AsyncEngine
from jdllm.serving.demands import Demand, Life, Part
from jdllm.serving.scheduler import Scheduler
from tests.serving.plans import FULL, LIMITS, REFRESH, Plans, full, refresh, with_lives


class TestCalls:
    def test_a_call_of_many_requests_holds_nobody_up(self):
        limits = dataclasses.replace(LIMITS, max_num_seqs=2)
        scheduler = with_lives(*[Life(1, 1)] * 100, limits=limits, call=0)
        started = scheduler.admit()
        for one, other in ((100, 200), (101, 201)):
            scheduler.add(one, Life(1, 1))
            scheduler.add(other, Life(1, 1))
        for _ in range(4):
            scheduler.remove(started[-1])
            started += scheduler.admit()
        assert started[2:] == [2, 100, 200, 101]

    def test_calls_share_what_starts(self):
        limits = dataclasses.replace(LIMITS, max_num_seqs=1)
        scheduler = Scheduler(limits)
        for request in range(30):
            scheduler.add(request, Life(1, 1), call=0 if request < 12 else 1 if request < 20 else 2)
        started = []
        while scheduler.waiting:
            started += scheduler.admit()
            scheduler.remove(started[-1])
        assert started[:9] == [0, 12, 20, 1, 13, 21, 2, 14, 22]
        assert sorted(started) == list(range(30))

    @pytest.mark.parametrize("pages", [0, 1])
    def test_the_lowest_priority_number_starts_first_and_is_served_first(self, pages: int):
        limits = dataclasses.replace(LIMITS, max_num_seqs=2)
        scheduler = Scheduler(limits)
        for request, priority in enumerate((0, 5, -1, 0)):
            scheduler.add(request, Life(60, pages, holds=True), priority=priority)
        order = scheduler.admit()
        assert order == ([2, 0] if pages else [2])
        for request in (2, 0, 3):
            if request not in scheduler.running:
                scheduler.admit()
            ready = {running: full(60) for running in scheduler.running}
            assert [part.ids for part in scheduler.plan(ready)] == [(request,)]
            scheduler.remove(request)
        assert {*scheduler.running, *scheduler.admit()} == {1}

    def test_whole_sequences_take_turns_by_rows(self):
        """A call of 19 rows a step has five steps for one of a call of 95."""
        plans = Plans(full(95), full(19))
        served = [plans.plan()[FULL] for _ in range(60)]
        assert served[:2] == [(0,), (1,)]
        assert served.count((0,)) == 10

    def test_in_step_with_other_processes_no_clock_decides(self):
        """Parts are those of a device that takes a second for each row."""
        demands = full(95), full(19)
        by_rows, in_step = Plans(*demands), Plans(*demands, limits=dataclasses.replace(LIMITS, in_step=True))
        for turn in range(60):
            parts = in_step.scheduler.plan(in_step.ready)
            for part in parts:
                in_step.scheduler.charge(part, 7.0 ** (turn % 4))
            assert {part.kind: part.ids for part in parts} == by_rows.plan()

    def test_clients_do_not_share_an_engine_that_is_in_step_with_other_processes(self):
        scheduler = Scheduler(dataclasses.replace(LIMITS, in_step=True))
        with pytest.raises(ConfigError, match="devices are those of several processes"):
            scheduler.share()
        engine: Any = SimpleNamespace(scheduler=scheduler)
        with pytest.raises(ConfigError, match="devices are those of several processes"):
            AsyncEngine(engine)

    def test_a_short_one_does_not_pay_for_longer_ones(self):
        assert Plans(full(10), full(41), full(40)).plan() == {FULL: (0, 2)}
        assert Plans(full(41), full(10)).plan() == {FULL: (0, 1)}
        scheduler = with_lives(*[Life(1, 0)] * 2, call=3)
        scheduler.admit()
        assert scheduler.plan({0: full(10), 1: full(41)}) == [Part(FULL, (0, 1))]

    def test_small_ones_do_not_pass_a_large_one_for_ever(self):
        plans = Plans(*[refresh(60)] * 2, full(70), full(10))
        served = [plans.plan().get(FULL, ()) for _ in range(40)]
        assert sum(2 in ids for ids in served) >= 4

    def test_who_joined_many_parts_waits_no_longer_for_it(self):
        plans = Plans(full(10), full(40), full(90))
        for _ in range(50):
            plans.plan()
        plans.scheduler.remove(0)
        del plans.ready[0]
        served = [plans.plan()[FULL] for _ in range(5)]
        assert (1,) in served

    @pytest.mark.parametrize("short", [full(4), refresh(4)])
    def test_a_short_one_waits_for_one_part_of_long_ones(self, short: Demand):
        """It has less of the device than one of their parts takes, so they go on when it has ended."""
        plans = Plans(*[full(95)] * 9)
        plans.plan()
        in_flight = plans.scheduler.plan(plans.ready)
        plans.scheduler.add(9, Life(4, int(short.kind is REFRESH)))
        plans.scheduler.admit()
        for request in in_flight[0].ids:
            del plans.ready[request]
        plans.ready[9] = short
        assert plans.scheduler.plan(plans.ready, [FULL], 95) == (
            [] if short.kind is FULL else [Part(REFRESH, (9,))]
        )
        plans.scheduler.charge(in_flight[0], 95)
        plans.ready |= dict.fromkeys(in_flight[0].ids, full(95))
        assert [plans.plan() for _ in range(8)] == [{short.kind: (9,)}] * 8

    @pytest.mark.parametrize("short", [full(20), refresh(20)])
    def test_newcomers_do_not_pass_a_long_one_for_ever(self, short: Demand):
        """Two calls run at a time, and the longest part takes 95 seconds: one is overdue after 8 times 95."""
        plans, waits = Plans(full(95)), [0]
        plans.plan()
        for newcomer in range(1, 200):
            plans.scheduler.add(newcomer, Life(20, int(short.kind is REFRESH)))
            plans.scheduler.admit()
            plans.ready[newcomer] = short
            while (served := plans.plan()).get(short.kind) != (newcomer,):
                assert served == {FULL: (0,)}
                waits.append(0)
            waits[-1] += 20
            plans.scheduler.remove(newcomer)
            del plans.ready[newcomer]
        assert len(waits) > 4
        assert max(waits) <= 8 * 95 + 20

    def test_a_newcomer_goes_first_for_as_long_as_the_longest_part_takes(self):
        plans = Plans(full(50), full(50))
        for _ in range(9):
            plans.plan()
        plans.scheduler.add(2, Life(1, 0))
        plans.scheduler.admit()
        plans.ready[2] = full(60)
        assert [plans.plan()[FULL] for _ in range(4)] == [(2,), (2,), (0, 1), (2,)]


class TestCallsOfServers:
    """Clients share the engine: eight places, 50 pages, 100 rows of whole sequences."""

    LIMITS = dataclasses.replace(LIMITS, shared=True)

    @pytest.mark.parametrize(
        ("life", "started", "alone"),
        [
            (Life(1, 1), 7, 8),
            (Life(1, 6), 7, 8),
            (Life(1, 10), 4, 5),
            (Life(20, 0, holds=True), 4, 5),
            (Life(1, 0, holds=True), 7, 8),
            (Life(1, 0), 8, 8),
        ],
    )
    def test_a_call_leaves_room_to_another(self, life: Life, started: int, alone: int):
        assert with_lives(*[life] * 100, call=0).admit() == list(range(alone))
        scheduler = with_lives(*[life] * 100, limits=self.LIMITS, call=0)
        assert scheduler.admit() == list(range(started))
        other = life._replace(rows=min(life.rows, 12), pages=min(life.pages, 6))
        scheduler.add(100, other)
        assert scheduler.admit() == [100]
        scheduler.remove(0)
        assert scheduler.admit() == [started]

    @pytest.mark.parametrize("life", [Life(1, 50), Life(100, 0, holds=True)])
    def test_one_request_of_a_call_may_take_all(self, life: Life):
        scheduler = with_lives(*[life] * 3, limits=self.LIMITS, call=0)
        for request in range(3):
            assert scheduler.admit() == [request]
            scheduler.remove(request)

    def test_requests_of_a_call_do_not_pass_each_other(self):
        scheduler = with_lives(Life(1, 30), Life(1, 20), Life(1, 1), limits=self.LIMITS, call=0)
        assert scheduler.admit() == [0]
        scheduler.remove(0)
        assert scheduler.admit() == [1, 2]

    def test_a_call_that_others_pass_gains_no_turns(self):
        """Twenty others start beside seven of a call, whose room then goes to another call in its turn."""
        scheduler = with_lives(*[Life(1, 6)] * 100, limits=self.LIMITS, call=0)
        running = scheduler.admit()
        for other in range(100, 120):
            scheduler.add(other, Life(1, 8))
            assert scheduler.admit() == [other]
            scheduler.remove(other)
        scheduler.add(200, Life(1, 12))
        for started in ([], [200]):
            scheduler.remove(running.pop())
            found = scheduler.admit()
            running += found
            assert [request for request in found if request == 200] == started

    def test_an_engine_may_be_shared_from_some_time_on(self):
        scheduler = with_lives(*[Life(1, 1)] * 100, call=0)
        assert not scheduler.limits.shared
        scheduler.share()
        assert scheduler.limits.shared
        assert scheduler.admit() == list(range(7))
