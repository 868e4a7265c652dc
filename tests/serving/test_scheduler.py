"""The scheduler's rules, one by one."""

import dataclasses
import sys
import threading
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.errors import RequestError
from jdllm.serving.demands import SUBMITTED, Demand, Held, Life, Part
from jdllm.serving.scheduler import Scheduler
from tests.serving.plans import (
    ADAPTIVE,
    DECODE,
    FULL,
    LAYERS,
    LIMITS,
    PREFILL,
    REFRESH,
    REUSE,
    STAGE,
    Plans,
    adaptive,
    full,
    layers,
    prepare,
    refresh,
    reuse,
    with_lives,
)


class TestAdd:
    def test_more_pages_than_the_pool_has_are_refused(self):
        scheduler = with_lives(Life(1, 50))
        with pytest.raises(
            RequestError, match="a request needs 51 pages of the KV pool, which has 50: shorten"
        ):
            scheduler.add(7, Life(1, 51))
        assert scheduler.waiting == (0,)

    @pytest.mark.parametrize(("pages", "longest"), [(0, 150), (1, 140)])
    def test_more_rows_than_run_alone_are_refused(self, pages: int, longest: int):
        scheduler = with_lives(Life(longest, pages))
        with pytest.raises(
            RequestError, match=f"a step of {longest + 1} rows, and at most {longest} fit: shorten"
        ):
            scheduler.add(7, Life(longest + 1, pages))
        assert scheduler.waiting == (0,)


class TestAdmission:
    def test_pages_are_those_of_the_whole_life(self):
        scheduler = with_lives(Life(10, 20), Life(10, 25), Life(10, 6), Life(10, 5))
        assert scheduler.admit() == [0, 1]
        assert scheduler.free_pages == 5
        assert (scheduler.running, scheduler.waiting) == ((0, 1), (2, 3))

    def test_nobody_overtakes_who_needs_the_same(self):
        scheduler = with_lives(Life(10, 30), Life(10, 30), Life(10, 1), Life(10, 0))
        assert scheduler.admit() == [0, 3]
        assert scheduler.admit() == []
        scheduler.remove(0)
        assert scheduler.admit() == [1, 2]
        assert scheduler.running == (1, 2, 3)

    def test_requests_that_hold_nothing_wait_for_nobody(self):
        scheduler = with_lives(Life(1, 50), Life(1, 1), Life(90, 0, holds=True), *[Life(100, 0)] * 20)
        assert scheduler.admit() == [0, 2, *range(3, 23)]

    @pytest.mark.parametrize(("holds", "call"), [(False, 7), (True, 7), (True, None)])
    def test_those_of_one_call_fit_one_part_and_so_do_those_that_hold_memory(
        self, holds: bool, call: int | None
    ):
        scheduler = with_lives(*(Life(rows, 0, holds) for rows in (60, 40, 1, 1)), call=call)
        scheduler.add(4, Life(1, 1))
        scheduler.add(5, Life(1, 0))
        assert set(scheduler.admit()) == {0, 1, 4, 5}
        scheduler.remove(1)
        assert scheduler.admit() == [2, 3]

    def test_at_most_max_num_seqs_with_pages_of_one_call_or_holding_memory(self):
        assert with_lives(*[Life(1, 1)] * 9).admit() == list(range(8))
        assert with_lives(*[Life(1, 0)] * 9, call=3).admit() == list(range(8))
        assert with_lives(*[Life(1, 0, holds=True)] * 9).admit() == list(range(8))
        assert with_lives(*[Life(1, 0)] * 9).admit() == list(range(9))

    def test_what_takes_the_room_of_the_pool_runs_while_nobody_holds_pages(self):
        scheduler = with_lives(Life(10, 1), Life(131, 0), Life(10, 1))
        assert scheduler.admit() == [0]
        scheduler.remove(0)
        assert scheduler.admit() == [1]
        assert scheduler.admit() == []
        scheduler.remove(1)
        assert scheduler.admit() == [2]
        assert with_lives(Life(10, 1), Life(130, 0), Life(10, 1)).admit() == [0, 1, 2]

    def test_a_longer_request_without_pages_is_the_only_one_of_its_call(self):
        scheduler = with_lives(Life(1, 0), Life(101, 0), Life(1, 0), call=3)
        assert scheduler.admit() == [0]
        scheduler.remove(0)
        assert scheduler.admit() == [1]
        assert scheduler.admit() == []
        scheduler.remove(1)
        assert scheduler.admit() == [2]

    def test_an_aborted_request_makes_room_waiting_or_running(self):
        scheduler = with_lives(Life(10, 50), Life(10, 50), Life(10, 50))
        scheduler.admit()
        scheduler.remove(1)
        assert scheduler.waiting == (2,)
        scheduler.remove(0)
        assert scheduler.free_pages == 50
        assert scheduler.admit() == [2]
        assert scheduler.free_pages == 0

    def test_other_threads_may_ask_who_runs(self):
        scheduler, asked, faults = Scheduler(LIMITS), threading.Event(), list[Exception]()

        def ask() -> None:
            while not asked.is_set():
                try:
                    assert set(scheduler.running) | set(scheduler.waiting) <= set(range(10_000))
                except Exception as fault:
                    faults.append(fault)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            thread = threading.Thread(target=ask)
            thread.start()
            for request in range(10_000):
                scheduler.add(request, Life(1, 1))
                scheduler.admit()
                if request >= 6:
                    scheduler.remove(request - 6)
        finally:
            sys.setswitchinterval(interval)
            asked.set()
            thread.join()
        assert not faults


class TestParts:
    def test_one_part_of_each_kind_the_reuse_first(self):
        plans = Plans(full(10), adaptive(10), refresh(10), reuse(10), full(10), reuse(10), prepare(10))
        found = plans.scheduler.plan(plans.ready)
        assert found[:3] == [Part(REUSE, (3, 5)), Part(REFRESH, (2,)), Part(FULL, (0, 4))]
        assert found[3:] == [Part(ADAPTIVE, (1,)), Part(STAGE, (6,))]
        assert [part.kind for part in found] == [k for k in SUBMITTED if k < PREFILL]

    def test_decodes_go_on_beside_a_prompt(self):
        plans = Plans(Demand(PREFILL, 98, 1, 2), *[Demand(DECODE, 1, 1, 2)] * 3)
        assert plans.scheduler.plan(plans.ready) == [Part(DECODE, (1, 2)), Part(PREFILL, (0,))]

    def test_whole_sequences_are_few_beside_requests_with_pages(self):
        limits = dataclasses.replace(LIMITS, company_rows=25)
        scheduler = with_lives(*[Life(10, 0)] * 3, limits=limits, call=0)
        scheduler.add(3, Life(30, 1))
        scheduler.admit()
        ready = {**dict.fromkeys(range(3), full(10)), 3: refresh(30)}
        first, second = (scheduler.plan(ready), scheduler.plan(ready))
        assert [part.ids for part in first] == [(3,), (0, 1)]
        assert [part.ids for part in second] == [(3,), (0, 2)]
        scheduler.remove(3)
        del ready[3]
        assert [part.ids for part in scheduler.plan(ready)] == [(0, 1, 2)]

    def test_one_request_is_prepared_at_a_time(self):
        assert Plans(prepare(10), prepare(10)).plan() == {STAGE: (0,)}

    def test_nothing_is_ready(self):
        assert Plans().plan() == {}

    def test_a_kind_in_flight_gets_no_other_part(self):
        assert Plans(refresh(10), reuse(10), full(10)).plan({REFRESH, FULL}, 20) == {REUSE: (1,)}
        assert Plans(refresh(10)).plan([REFRESH], 10) == {}

    def test_rows_in_flight_count(self):
        assert Plans(reuse(30), reuse(10), full(15)).plan([REFRESH], 50) == {REUSE: (0, 1)}

    def test_smaller_requests_pass_larger_ones(self):
        assert Plans(refresh(60), refresh(50), refresh(40), refresh(1)).plan() == {REFRESH: (0, 2)}

    def test_head_rows_of_a_part(self):
        found = Plans(full(1, 40), full(1, 21), full(1, 20), refresh(1, 60)).plan()
        assert found == {FULL: (0, 2), REFRESH: (3,)}

    def test_entries_of_a_part(self):
        found = Plans(reuse(1, 1, 15), reuse(1, 1, 6), reuse(1, 1, 5)).plan()
        assert found == {REUSE: (0, 2)}

    def test_rows_of_a_part_that_reuses(self):
        limits = dataclasses.replace(LIMITS, reuse_rows=90)
        found = Plans(reuse(60), reuse(31), reuse(30), refresh(5), limits=limits).plan()
        assert found == {REUSE: (0, 2), REFRESH: (3,)}

    @pytest.mark.parametrize("large", [reuse(1, 61, 1), reuse(1, 1, 21)])
    def test_more_than_a_part_holds_is_alone_in_its_part(self, large: Demand):
        plans = Plans(large, reuse(1), large, refresh(1))
        assert plans.plan() == {REUSE: (0,), REFRESH: (3,)}
        assert plans.plan() == {REUSE: (1,), REFRESH: (3,)}
        assert plans.plan() == {REUSE: (2,), REFRESH: (3,)}
        assert Plans(refresh(1), large).plan() == {REUSE: (1,), REFRESH: (0,)}


class TestTurns:
    def test_who_was_served_least_recently_comes_first(self):
        plans = Plans(full(60), full(60), full(60))
        assert [plans.plan()[FULL] for _ in range(5)] == [(0,), (1,), (2,), (0,), (1,)]

    def test_ties_go_to_the_earlier_arrival(self):
        plans = Plans(refresh(40), refresh(40), refresh(40))
        assert [plans.plan()[REFRESH] for _ in range(3)] == [(0, 1), (0, 2), (0, 1)]

    def test_parts_are_in_the_order_of_arrival_whatever_the_ids(self):
        scheduler = Scheduler(LIMITS)
        for request in (9, 3, 5):
            scheduler.add(request, Life(40, 1))
        scheduler.admit()
        ready = {3: full(40), 5: full(40), 9: full(40)}
        assert [scheduler.plan(ready)[0].ids for _ in range(3)] == [(9, 3), (9, 5), (9, 3)]

    def test_a_new_request_waits_behind_those_that_ran_before(self):
        plans = Plans(refresh(60), refresh(60))
        assert plans.plan() == {REFRESH: (0,)}
        plans.scheduler.add(2, Life(60, 1))
        plans.scheduler.admit()
        plans.ready[2] = refresh(60)
        assert [plans.plan()[REFRESH] for _ in range(4)] == [(1,), (0,), (2,), (1,)]

    def test_reuses_pick_before_refreshes(self):
        plans = Plans(refresh(60), refresh(40), reuse(20), reuse(20))
        assert plans.plan() == {REUSE: (2, 3), REFRESH: (0,)}
        assert plans.plan() == {REUSE: (2, 3), REFRESH: (1,)}

    def test_the_oldest_picks_before_reuses(self):
        plans = Plans(reuse(50), reuse(50), refresh(60))
        assert plans.plan() == {REUSE: (0, 1)}
        assert plans.plan() == {REFRESH: (2,)}
        assert plans.plan() == {REUSE: (0, 1)}

    def test_nobody_passes_the_oldest_that_waits_for_what_is_in_flight(self):
        plans = Plans(refresh(60), full(20), adaptive(20))
        assert plans.plan([REUSE], 50) == {}
        assert plans.plan([REUSE], 40) == {REFRESH: (0,)}

    def test_the_oldest_of_a_kind_in_flight_holds_nobody_up(self):
        assert Plans(refresh(90), full(20)).plan([REFRESH], 50) == {FULL: (1,)}


class TestLongRequests:
    def test_one_runs_alone_when_it_is_the_oldest(self):
        plans = Plans(refresh(120), reuse(1), full(1))
        assert plans.plan() == {REFRESH: (0,)}
        assert plans.plan() == {REUSE: (1,), FULL: (2,)}
        assert plans.plan() == {REFRESH: (0,)}

    def test_others_wait_until_nothing_else_is_in_flight(self):
        plans = Plans(refresh(120), reuse(1), full(1))
        assert plans.plan([ADAPTIVE], 1) == {}
        assert plans.plan() == {REFRESH: (0,)}

    def test_nothing_joins_it_in_flight(self):
        plans = Plans(refresh(120), reuse(1), full(1))
        plans.plan()
        del plans.ready[0]
        assert plans.plan([REFRESH], 120) == {}
        assert plans.plan() == {REUSE: (1,), FULL: (2,)}


class TestRefreshesAreSpread:
    @given(
        due=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 80)), min_size=1, max_size=12),
        reuses=st.lists(st.integers(1, 20), max_size=2),
        head_limit=st.sampled_from([10**6, 60]),
        sizes=st.sampled_from([(), (10, 20, 40, 100)]),
    )
    def test_each_waits_as_long_as_next_fit_says(
        self, due: list[tuple[int, int]], reuses: list[int], head_limit: int, sizes: tuple[int, ...]
    ):
        """The bound that the module states, beside reuses that run in every iteration."""
        demands = [*(refresh(*x) for x in due), *map(reuse, reuses)]
        limits = dataclasses.replace(LIMITS, max_num_logits=head_limit, sizes={REFRESH: sizes})
        plans, share = Plans(*demands, limits=limits), 4 if sizes else 2
        room = 100 - sum(reuses)
        iterations, used = 0, Fraction()
        waits = {}
        while len(waits) < len(due):
            iterations += 1
            for request in plans.plan().get(REFRESH, ()):
                waits[request] = iterations
                del plans.ready[request]
        for request, (rows, head_rows) in enumerate(due):
            used += Fraction(share * rows, room) + Fraction(2 * min(head_rows, head_limit), head_limit)
            assert waits[request] <= ceil(used)

    def test_refreshes_that_fit_exactly_leave_no_gap(self):
        plans = Plans(*[refresh(50)] * 6)
        assert [plans.plan()[REFRESH] for _ in range(3)] == [(0, 1), (2, 3), (4, 5)]


class TestPartsFillExecutables:
    LIMITS = dataclasses.replace(LIMITS, sizes={REFRESH: (32, 64, 100)})

    @pytest.mark.parametrize(
        ("rows", "served"),
        [
            ((30, 30, 10), 2),
            ((30, 30, 38), 3),
            ((30, 20), 1),
            ((20, 30), 2),
            ((10, 20, 40), 3),
            ((70,), 1),
        ],
    )
    def test_a_part_ends_where_it_fills_one_best(self, rows: tuple[int, ...], served: int):
        plans = Plans(*map(refresh, rows), reuse(1), limits=self.LIMITS)
        assert plans.plan()[REFRESH] == tuple(range(served))

    def test_who_is_in_step_stays_so(self):
        assert Plans(refresh(30), refresh(20), limits=self.LIMITS).plan() == {REFRESH: (0, 1)}

    def test_other_kinds_are_whole(self):
        assert Plans(full(30), full(20), reuse(1), limits=self.LIMITS).plan()[FULL] == (0, 1)


class TestLongRefreshes:
    """Request 0 has run some layers of its refresh."""

    HELD = Held(0, 50)

    def test_one_part_has_layers_of_one_request(self):
        assert Plans(layers(40), layers(40)).plan() == {LAYERS: (0,)}

    @pytest.mark.parametrize("demand", [full(1), adaptive(1), prepare(1), layers(1), refresh(51), reuse(51)])
    def test_who_needs_the_memory_waits(self, demand: Demand):
        plans = Plans(layers(60), demand)
        assert [plans.plan(held=self.HELD) for _ in range(3)] == [{LAYERS: (0,)}] * 3
        assert plans.plan(busy=(LAYERS,), rows=0, held=self.HELD) == {}
        assert 1 in {request for part in plans.plan().values() for request in part}

    def test_others_leave_room_for_the_hidden_rows(self):
        """Parts of others have at most 100 - 50 rows together, beside the 60 rows of the next layers."""
        plans = Plans(layers(60), refresh(30), refresh(30), reuse(10))
        assert plans.plan(held=self.HELD) == {REUSE: (3,), REFRESH: (1,), LAYERS: (0,)}
        assert plans.plan(held=self.HELD) == {REUSE: (3,), REFRESH: (2,), LAYERS: (0,)}
        assert plans.plan(busy=(LAYERS,), held=self.HELD) == {REUSE: (3,), REFRESH: (1,)}

    def test_who_waits_begins_next(self):
        plans = Plans(layers(60), layers(60), refresh(10))
        plans.plan(held=self.HELD)
        assert plans.plan() == {REFRESH: (2,), LAYERS: (1,)}
