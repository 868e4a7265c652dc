"""How many steps fit a time."""

import dataclasses

import pytest

from jdllm.serving.demands import HOST_SECONDS, Kind, Part
from jdllm.serving.pace import Pace
from tests.serving.plans import LIMITS, REUSE, Plans, reuse


class TestPace:
    def test_one_step_where_none_is_known(self):
        pace = Pace()
        pace.learn(Kind.FULL, 40, 0.01)
        assert pace.steps(Kind.REUSE, 40, 0.25) == 1
        assert pace.steps(Kind.FULL, 80, 0.25) == 1

    @pytest.mark.parametrize(("step", "steps"), [(0.01, 25), (0.011, 22), (0.25, 1), (0.3, 1), (0.0, 1)])
    def test_as_many_as_the_time_holds_and_at_least_one(self, step: float, steps: int):
        pace = Pace()
        pace.learn(Kind.REUSE, 40, step)
        assert pace.steps(Kind.REUSE, 40, 0.25) == steps

    def test_the_last_part_of_about_as_many_rows_counts(self):
        pace = Pace()
        pace.learn(Kind.REUSE, 33, 0.1)
        pace.learn(Kind.REUSE, 63, 0.01)
        pace.learn(Kind.REUSE, 64, 0.1)
        assert pace.steps(Kind.REUSE, 32, 0.25) == 25

    def test_a_step_that_waited_for_its_launch_counts_where_no_other_is_known(self):
        pace = Pace()
        for step, woke, known in (
            (0.1, True, 0.1),
            (0.02, False, 0.02),
            (0.2, True, 0.02),
            (0.04, False, 0.04),
        ):
            pace.learn(Kind.REUSE, 40, step, woke=woke)
            assert pace.steps(Kind.REUSE, 40, 1.0) == round(1 / known)

    @pytest.mark.parametrize(("seconds", "takes"), [(0.009, True), (0.01, True), (0.011, False)])
    def test_what_a_step_takes_is_known_once_there_was_one(self, seconds: float, takes: bool):
        pace = Pace()
        pace.learn(Kind.REUSE, 40, 0.01)
        assert pace.takes(Kind.REUSE, 40, seconds) == takes
        assert not pace.takes(Kind.REUSE, 80, seconds)


class TestParts:
    def test_a_part_of_a_server_takes_half_a_second(self):
        """The device may do fewer steps than it is told, as where a block is finished."""
        plans = Plans(*[reuse(20)._replace(steps=31)] * 2, limits=dataclasses.replace(LIMITS, shared=True))
        scheduler, found = plans.scheduler, list[int]()
        for did, seconds in ((1, 0.02), (20, 0.8), (12, 0.012), (31, 31.0), (1, 1.0)):
            (part,) = scheduler.plan(plans.ready)
            found.append(part.steps)
            scheduler.charge(Part(REUSE, part.ids, did), seconds)
        assert found == [1, 25, 12, 31, 1]

    def test_a_part_of_one_caller_ends_where_its_requests_need_something_else(self):
        plans = Plans(reuse(20)._replace(steps=31), reuse(20)._replace(steps=9))
        for _ in range(2):
            (part,) = plans.scheduler.plan(plans.ready)
            assert part.steps == 9
            plans.scheduler.charge(part, 90.0)

    @pytest.mark.parametrize(
        ("seconds", "ahead", "shared", "steps"),
        [
            (1.2 * HOST_SECONDS, True, True, 1),
            (1.2 * HOST_SECONDS, True, False, 31),
            (1.2 * HOST_SECONDS, False, True, 31),
            (0.8 * HOST_SECONDS, True, True, 31),
        ],
    )
    def test_a_part_is_one_step_where_the_next_can_be_submitted_meanwhile(
        self, seconds: float, ahead: bool, shared: bool, steps: int
    ):
        """Clients share the engine, and the step takes longer than the host does between two parts."""
        plans = Plans(
            *[reuse(20)._replace(steps=31, ahead=ahead), reuse(20)._replace(steps=31, ahead=True)],
            limits=dataclasses.replace(LIMITS, shared=shared),
        )
        (part,) = plans.scheduler.plan(plans.ready)
        plans.scheduler.charge(Part(REUSE, part.ids, 1), seconds)
        (part,) = plans.scheduler.plan(plans.ready)
        assert part.steps == steps

    def test_a_part_that_stores_finished_blocks_is_submitted_ahead(self):
        """Whether clients share the engine or not: it has one step in any case."""
        long, storing = reuse(20)._replace(steps=31), reuse(20)._replace(stores=True)
        plans = Plans(long, storing)
        assert plans.scheduler.pays_ahead([long, storing])
        assert not plans.scheduler.pays_ahead([long, reuse(20)])
        assert not plans.scheduler.pays_ahead([])
