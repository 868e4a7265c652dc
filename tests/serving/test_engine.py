"""What the engine submits, what its updates tell, and whom a failure touches."""

import gc
import threading
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import jax
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import KvPoolError, RequestError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended, StepUpdate
from tests.engines import engine_of, finish, generation_request


def make(config: ModelConfig, lengths: Sequence[int], **options: Any) -> list[Request]:
    """Requests with prompts of the given lengths that generate eight tokens in blocks of four."""
    given = {"gen_length": 8, "block_length": 4, "early_stop": False, "return_history": True, **options}
    sampling = SamplingParams(**given)
    return [generation_request(i, np.arange(1, n + 1), sampling, config) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def build(params: Params, config: ModelConfig, executables: Executables):
    def build(rows: int = 128, **options: Any) -> Engine:
        return engine_of(params, config, executables, rows, **options)

    return build


def submitted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kind, list[int], int]]:
    """Notes every part: its kind, the lengths of its requests and the steps that it may do."""
    parts, submit = [], engine.runner.submit

    def note(kind: Kind, requests: list[Request], max_steps: int) -> Any:
        parts.append((kind, [len(r.prompt) for r in requests], max_steps))
        return submit(kind, requests, max_steps)

    monkeypatch.setattr(engine.runner, "submit", note)
    return parts


def histories(states: Sequence[Request]) -> list[np.ndarray]:
    return [np.stack(state.history) for state in states]


def same(some: Sequence[Request], others: Sequence[Request]) -> None:
    for a, b in zip(histories(some), histories(others), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_request_beyond_the_budget_runs_alone_and_in_its_turn(build, config, monkeypatch):
    engine = build(40)
    parts = submitted(engine, monkeypatch)
    finish(engine, make(config, [10, 90, 11]))
    assert [lengths for lengths, _ in groupby(lengths for _, lengths, _ in parts)] == [[10], [90], [11]]


def test_guidance_counts_twice(build, config, monkeypatch):
    engine = build(80)
    parts = submitted(engine, monkeypatch)
    finish(engine, make(config, [12, 11, 10], cfg_scale=1.0))
    assert [lengths for lengths, _ in groupby(lengths for _, lengths, _ in parts)] == [[12, 11], [10]]


def test_all_in_step_run_to_the_end_of_a_block(build, config, monkeypatch):
    engine = build()
    parts = submitted(engine, monkeypatch)
    finish(engine, make(config, [5, 9], cache="dual"))
    assert parts == 2 * [(Kind.REFRESH, [5, 9], 1), (Kind.REUSE, [5, 9], 3)]


def test_who_arrives_later_joins_and_nobody_runs_alone(build, config, monkeypatch):
    """The second request starts three steps behind the first one; they share every step from then on."""
    engine = build()
    first, second = make(config, [5, 9], cache="dual", block_length=8)
    engine.add(first.spec, updates="every")
    for _ in range(3):
        engine.step()
    parts = submitted(engine, monkeypatch)
    engine.add(second.spec, updates="every")
    while not engine.idle:
        engine.step()
    reuses = [lengths for kind, lengths, _ in parts if kind is Kind.REUSE]
    assert sum(len(lengths) == 2 for lengths in reuses) >= 3
    assert sum(map(len, reuses)) == 2 * 7 - 2  # a refresh and seven reuses each, two of them done


def test_requests_hold_their_results_and_times(build, config):
    _, states = finish(build(64), make(config, [3, 50, 49]))
    for request in states:
        assert request.finished
        assert request.steps == 8
        assert not (request.tokens == request.mask_id).any()
        times = request.timings()
        assert times.queued >= 0
        assert times.running > 0
        assert times.total == times.queued + times.running
    assert states[1].timings().queued > states[0].timings().queued


def test_updates_of_a_whole_block_come_step_by_step(build, config):
    runs = [
        finish(build(), make(config, [5, 9]), updates="every" if every else "later")[0]
        for every in (False, True)
    ]
    assert [(u.request, u.step) for u in runs[0]] == [(r, s) for s in range(8) for r in (0, 1)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("options", [{}, {"cache": "dual", "logprobs": True}, {"return_history": False}])
def test_steps_that_nobody_asks_for_commit_the_same(build, config, options: dict[str, Any]):
    asked = make(config, [5, 9], transfer="threshold", threshold=0.01, **options)
    (told, expected), (silent, states) = (finish(build(), asked, updates=u) for u in ("later", "none"))
    assert told
    assert silent == []
    for a, b in zip(states, expected, strict=True):
        assert (a.steps, len(a.history)) == (b.steps, len(b.history))
        for name in ("tokens", "logprobs", "committed_in"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_nothing_to_do(build):
    engine = build()
    assert finish(engine, []) == ([], [])
    assert engine.step() == []


def test_ids_are_unique_in_the_process(build, config):
    engines = [build(), build()]
    ids = [engine.add(r.spec) for engine in engines for r in make(config, [3, 4])]
    assert len(set(ids)) == 4
    for engine in engines:
        while not engine.idle:
            engine.step()
        assert engine.stats().finished == 2


class Failing:
    """Executables of which the calls of one kind fail when told to; the arguments are lost as on a device."""

    def __init__(self, engine: Engine, kind: Kind, monkeypatch: pytest.MonkeyPatch):
        self.left = 0
        launch = engine.parts.launchers[kind]

        def failing(requests: list[Request], max_steps: int) -> Any:
            launched = launch(requests, max_steps)
            if not self.left:
                return launched
            self.left -= 1

            def fail() -> Any:
                pool = engine.pool.arrays
                if kind is Kind.REFRESH and pool is not None:
                    jax.tree.leaves(pool)[0].delete()
                raise RuntimeError("the device failed")

            return launched._replace(run=fail)

        monkeypatch.setitem(engine.parts.launchers, kind, failing)


@pytest.mark.parametrize("kind", [Kind.REFRESH, Kind.REUSE])
def test_a_failed_executable_touches_its_own_requests(build, config, kind: Kind, monkeypatch):
    """One has its keys in the pool when the step of another fails and takes the pool with it."""
    settings = [{"cache": "dual"}, {"cache": "prefix"}, {}]
    asked = [make(config, [9 + i], **options)[0] for i, options in enumerate(settings)]
    _, expected = finish(build(), asked)
    engine = build()
    failing = Failing(engine, kind, monkeypatch)
    updates: list[Any] = []
    lone = engine.add(asked[0].spec, updates="every", deliver=updates.append)
    for _ in range(3):
        engine.step()
    ids = [engine.add(request.spec, deliver=updates.append) for request in asked[2:]]
    lost = engine.add(asked[1].spec, deliver=updates.append)
    if kind is Kind.REUSE:
        engine.abort(lone)
        ids = ids[:1]
    else:
        ids = [lone, *ids]
    failing.left = 1
    while not engine.idle:
        engine.step()
    ended = {u.request: u for u in updates if isinstance(u, Ended)}
    assert str(ended[lost].error) == "the device failed"
    by_length = {len(r.prompt): r for r in expected}
    for request in ids:
        assert ended[request].error is None
        same([ended[request].state], [by_length[len(ended[request].state.prompt)]])
        steps = [u.step for u in updates if isinstance(u, StepUpdate) and u.request == request]
        assert steps == list(range(8))
    stats = engine.stats()
    assert (stats.failed, stats.rebuilt) == (1, int(kind is Kind.REFRESH))
    assert stats.free_pages == stats.pages
    _, again = finish(engine, asked)
    same(again, expected)


def test_aborted_requests_leave_the_others_alone(build, config):
    asked = make(config, [5, 9, 20, 21], cache="dual")
    _, expected = finish(build(), asked)
    engine = build(64)
    states: dict[int, Request] = {}
    ids = [engine.add(r.spec, updates="every") for r in asked]
    engine.abort(ids[2])
    for step in range(100):
        for update in engine.step():
            if isinstance(update, Ended):
                states[update.request] = update.state
        if step == 2:
            engine.abort(ids[0])
        if engine.idle:
            break
    assert set(states) == {ids[1], ids[3]}
    same([states[ids[1]], states[ids[3]]], [expected[1], expected[3]])
    stats = engine.stats()
    assert (stats.finished, stats.aborted, stats.free_pages) == (2, 2, stats.pages)


@pytest.mark.slow
def test_an_abandoned_run_frees_its_pages(build, config):
    engine = build(pages=3)
    run = engine.run([r.spec for r in make(config, [20, 21], cache="dual")])
    next(run)
    assert engine.stats().free_pages == 0
    del run
    gc.collect()
    assert engine.stats().free_pages == 2


def test_requests_wait_for_pages(build, config):
    engine = build(pages=3)
    asked = make(config, [60, 61, 50], cache="dual")  # of two pages, two and one: the pool has two
    updates, states = finish(engine, asked)
    assert all(r.finished for r in states)
    order = [update.request for update in updates]
    assert order == sorted(order)


def test_what_can_never_fit_is_refused_before_anything_runs(build, config, monkeypatch):
    engine = build(pages=3)
    parts = submitted(engine, monkeypatch)
    with pytest.raises((RequestError, KvPoolError), match=r"needs 3 pages of the KV pool, which has 2"):
        finish(engine, make(config, [20, 130], cache="dual"))
    assert parts == []
    assert engine.stats().free_pages == 2
    assert engine.idle or not engine.step()


@pytest.mark.slow
def test_two_threads_share_one_engine(build, config):
    asked = [make(config, [n], cache="dual", gen_length=32)[0] for n in (9, 70)]
    expected = [finish(build(), [request])[1][0] for request in asked]
    engine = build(256)
    found: list[Any] = [None, None]

    def run(i: int) -> None:
        found[i] = finish(engine, [asked[i]], updates="every")[1][0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(found, expected)


def test_a_run_inside_a_run(build, config):
    outer, inner = make(config, [9, 20], cache="dual")
    expected = [finish(build(), [request])[1][0] for request in (outer, inner)]
    engine = build()
    states = []
    for update in engine.run([outer.spec], updates="every"):
        if isinstance(update, StepUpdate) and update.step == 2:
            states += finish(engine, [inner])[1]
        if isinstance(update, Ended):
            states.append(update.state)
    same(states, expected[::-1])


def test_an_interrupt_leaves_an_engine_that_works(build, config, monkeypatch):
    asked = make(config, [9, 20], cache="dual")
    _, expected = finish(build(), asked)
    engine = build()
    collect = engine.runner.collect
    calls = iter([False, False, True])

    def interrupted(pending: Any) -> Any:
        if next(calls, False):
            raise KeyboardInterrupt
        return collect(pending)

    monkeypatch.setattr(engine.runner, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(engine, asked)
    _, states = finish(engine, asked)
    same(states, expected)
    stats = engine.stats()
    assert (stats.aborted, stats.finished, stats.free_pages) == (2, 2, stats.pages)


@pytest.mark.slow
def test_a_long_exact_request_takes_the_room_of_the_pool_and_gives_it_back(
    params, config, executables, monkeypatch
):
    """It waits until nobody holds pages; the pool is made again in the same shape for who comes after it."""
    before, long, after = (
        make(config, [n], gen_length=8, cache=cache)[0]
        for n, cache in ((20, "dual"), (200, "none"), (30, "dual"))
    )
    expected = [finish(engine_of(params, config, executables, 64), [r])[1][0] for r in (before, long, after)]
    engine = engine_of(params, config, executables, 64, max_context=128)
    parts = submitted(engine, monkeypatch)
    there: list[bool] = []
    collect = engine.runner.collect

    def note(pending: Any) -> Any:
        done = collect(pending)
        there.append(engine.pool.arrays is not None)
        return done

    monkeypatch.setattr(engine.runner, "collect", note)
    _, states = finish(engine, [before, long, after])
    same(states, expected)
    lengths = [lengths for _, lengths, _ in parts]
    assert [own for own, _ in groupby(lengths)] == [[20], [200], [30]]
    assert there == [own != [200] for own in lengths]
