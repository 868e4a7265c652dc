"""What an engine tells about itself, against what requests were asked to do."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.ladder import TILE_ROWS
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.runner import Runner
from jdllm.serving.updates import PartDone, Update
from tests.engines import engine_of, finish, generation_request

NOTHING = dict.fromkeys(Kind, 0)


@pytest.fixture
def engine(params: Params, config: ModelConfig, executables: Executables) -> Engine:
    return engine_of(params, config, executables, 128)


def make(config: ModelConfig, lengths: Sequence[int], **options: Any) -> list[Request]:
    """Requests that generate eight tokens in two blocks, one token a step."""
    given = {"gen_length": 8, "block_length": 4, "early_stop": False, **options}
    sampling = SamplingParams(**given)
    return [generation_request(i, np.arange(1, n + 1), sampling, config) for i, n in enumerate(lengths)]


class TestCounts:
    def test_nothing_has_happened(self, engine):
        stats = engine.stats()
        assert (stats.tokens, stats.parts, stats.rows, stats.head_rows) == (0, NOTHING, NOTHING, NOTHING)

    def test_whole_sequences_step_by_step(self, engine, config):
        finish(engine, make(config, [5]), updates="every")
        stats = engine.stats()
        assert (stats.tokens, stats.evaluated) == (8, 8)
        assert stats.parts == NOTHING | {Kind.FULL: 8}
        assert stats.rows == NOTHING | {Kind.FULL: 8 * 13}
        assert stats.head_rows == NOTHING | {Kind.FULL: 2 * (4 + 3 + 2 + 1)}

    def test_a_part_of_several_steps_counts_each(self, engine, config):
        finish(engine, make(config, [5]))
        stats = engine.stats()
        assert (stats.tokens, stats.evaluated) == (8, 8)
        assert stats.parts == NOTHING | {Kind.FULL: 2}
        assert stats.rows == NOTHING | {Kind.FULL: 8 * 13}
        assert stats.head_rows == NOTHING | {Kind.FULL: 8 * 4}

    def test_refreshes_and_reuses(self, engine, config):
        finish(engine, make(config, [5, 9], cache="dual"), updates="every")
        stats = engine.stats()
        assert stats.parts == NOTHING | {Kind.REFRESH: 2, Kind.REUSE: 6}
        assert stats.rows == NOTHING | {Kind.REFRESH: 2 * (13 + 17), Kind.REUSE: 6 * 2 * TILE_ROWS}
        assert stats.head_rows == NOTHING | {Kind.REFRESH: 2 * 2 * 4, Kind.REUSE: 2 * 2 * (3 + 2 + 1)}

    def test_guidance_doubles_rows_and_no_tokens(self, engine, config):
        finish(engine, make(config, [5], cfg_scale=1.0), updates="every")
        stats = engine.stats()
        assert stats.tokens == 8
        assert stats.rows[Kind.FULL] == 2 * 8 * 13
        assert stats.head_rows[Kind.FULL] == 2 * 20

    @pytest.mark.parametrize("updates", ["every", "later", "none"])
    def test_all_that_was_masked_is_committed_once(self, engine, config, updates: Any):
        asked = make(config, [5, 9], transfer="threshold", threshold=0.01)
        _, states = finish(engine, asked, updates=updates)
        stats = engine.stats()
        assert stats.tokens == 16
        assert stats.evaluated < sum(state.steps for state in states)  # they share steps

    def test_what_an_aborted_request_committed_counts(self, engine, config):
        request = engine.add(make(config, [5])[0].spec, updates="every")
        for _ in range(3):
            engine.step()
        engine.abort(request)
        assert engine.step() == []
        assert engine.stats().tokens == 3


class TestObserver:
    def test_each_part_is_told_once(self, engine, config):
        parts: list[PartDone] = []
        engine.observe = parts.append
        finish(engine, make(config, [5, 9], cache="dual"))
        found = [(p.kind, p.requests, p.rows, p.head_rows, p.steps) for p in parts]
        refresh, reuse = (Kind.REFRESH, 2, 30, 8, 1), (Kind.REUSE, 2, 2 * TILE_ROWS, 6, 3)
        assert found == 2 * [refresh, reuse]

    def test_its_time_is_that_between_submission_and_collection(self, engine, config, monkeypatch):
        collect = Runner.collect

        def slow(runner: Runner, pending: Any) -> Any:
            time.sleep(0.05)
            return collect(runner, pending)

        parts: list[PartDone] = []
        engine.observe = parts.append
        finish(engine, make(config, [5]))
        monkeypatch.setattr(Runner, "collect", slow)
        start = time.perf_counter()
        finish(engine, make(config, [5]))
        spent = time.perf_counter() - start
        assert all(part.seconds >= 0.05 for part in parts[2:])
        assert sum(part.seconds for part in parts[2:]) <= spent

    def test_the_device_is_idle_while_the_host_is_busy_with_requests(self, engine, config):
        parts: list[PartDone] = []
        engine.observe = parts.append
        engine.add(make(config, [5])[0].spec, updates="every")
        while not engine.idle:
            engine.step()
            time.sleep(0.02)
        assert parts[0].idle == 0
        assert all(part.idle >= 0.02 for part in parts[1:])

    def test_without_requests_it_is_not(self, engine, config):
        """The last part of aborted requests is collected when nobody is left."""
        parts: list[PartDone] = []
        engine.observe = parts.append
        lone, other = make(config, [5, 9])
        [cached] = make(config, [5], cache="dual")
        finish(engine, [lone])
        time.sleep(0.05)
        requests = [engine.add(request.spec, updates="every") for request in (lone, cached)]
        engine.step()  # runs two parts, of different kinds, and collects one
        for request in requests:
            engine.abort(request)
        engine.step()
        time.sleep(0.05)
        finish(engine, [other])
        assert len(parts) == 2 + 2 + 2
        assert max(part.idle for part in parts) < 0.05
        assert [part.idle for part in parts[::2]] == [0, 0, 0]


class TestRequests:
    def test_they_are_told_from_their_arrival_to_their_end(self, engine, config):
        asked = make(config, [5, 100], gen_length=8)
        ids = [engine.add(request.spec, updates="every") for request in asked]
        first, second = engine.requests()
        assert first[:2] + first[3:] == (ids[0], False, 5, 13, 8, 0)
        assert second[:2] + second[3:] == (ids[1], False, 100, 108, 8, 0)
        for _ in range(3):
            engine.step()
        later = {state.id: state for state in engine.requests()}
        assert later[ids[0]].running
        assert (later[ids[0]].masked, later[ids[0]].steps) == (5, 3)
        assert later[ids[0]].age > first.age >= 0
        while not engine.idle:
            engine.step()
        assert engine.requests() == []

    def test_one_that_does_not_fit_yet_waits(self, engine, config):
        call = engine.new_call()
        for request in make(config, [100, 101]):
            engine.add(request.spec, updates="every", call=call)
        engine.step()
        assert [state.running for state in engine.requests()] == [True, False]

    def test_the_lowest_priority_number_starts_first(self, engine, config):
        """Only one of them fits a part of their call."""
        specs = [make(config, [100], priority=priority)[0].spec for priority in (0, 5, -1)]
        call = engine.new_call()
        first, second, third = (engine.add(spec, call=call) for spec in specs)
        order = []
        while not engine.idle:
            engine.step()
            order += [state.id for state in engine.requests() if state.running]
        assert list(dict.fromkeys(order)) == [third, first, second]

    def test_a_thread_returns_as_soon_as_its_own_requests_have_ended(self, engine, config):
        """Another thread drives the engine, and does not let go of it before the first has returned."""
        long, short = make(config, [60])[0], make(config, [5], gen_length=4)[0]
        thread = threading.Thread(target=lambda: list(engine.run([short.spec])))
        returned: list[bool] = []

        def drive(_: Update) -> None:
            if thread.ident is not None:
                return
            thread.start()
            while not engine.stats().finished:
                engine.step()
            engine.step()  # delivers its end
            thread.join(10)
            returned.append(not thread.is_alive())

        engine.add(long.spec, updates="every", deliver=drive)
        while not engine.idle:
            engine.step()
        thread.join()
        assert returned == [True]

    def test_those_of_one_run_share_a_part_and_hold_up_nobody(self, engine, config):
        updates = engine.run([request.spec for request in make(config, [100, 101])], updates="every")
        next(updates)
        engine.add(make(config, [102])[0].spec)
        engine.step()
        assert [state.running for state in engine.requests()] == [True, False, True]
        updates.close()

    @pytest.mark.slow
    def test_any_thread_may_ask_at_any_time(self, engine, config):
        """A reader never sees a request twice, nor one that is more or less than whole."""
        asked = make(config, [5, 9, 13, 17], cache="dual")
        over, seen = threading.Event(), []

        def read() -> None:
            while not over.is_set():
                states, stats = engine.requests(), engine.stats()
                seen.append((len({state.id for state in states}) == len(states), stats.tokens))

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(5):
            finish(engine, asked, updates="every")
        over.set()
        reader.join()
        assert all(once for once, _ in seen)
        tokens = [count for _, count in seen]
        assert tokens == sorted(tokens)
        assert engine.stats().tokens == 5 * 32


class TestDelivery:
    def test_updates_come_behind_the_next_submission(self, engine, config, monkeypatch):
        """The device is busy while they are read."""
        events: list[str] = []
        submit = engine.runner.submit

        def note(*args: Any) -> Any:
            events.append("submitted")
            return submit(*args)

        monkeypatch.setattr(engine.runner, "submit", note)
        [lone] = make(config, [5])
        engine.add(lone.spec, updates="every", deliver=lambda update: events.append(type(update).__name__))
        while not engine.idle:
            engine.step()
        assert events == ["submitted", *["submitted", "StepUpdate"] * 7, "StepUpdate", "Ended"]

    def test_who_is_aborted_is_told_nothing_more(self, engine, config):
        told: list[Any] = []
        requests = [engine.add(r.spec, updates="every", deliver=told.append) for r in make(config, [5, 9])]
        engine.step()
        assert told == []
        engine.abort(requests[0])
        while not engine.idle:
            engine.step()
        assert {update.request for update in told} == {requests[1]}
        assert len(told) == 9
