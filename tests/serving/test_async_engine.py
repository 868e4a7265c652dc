"""The engine for asyncio: many at once, cancelled ones, failures."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving import async_engine
from jdllm.serving.async_engine import AsyncEngine
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended, PartDone, StepUpdate, Update
from tests.engines import engine_of, finish, generation_request


@pytest.fixture
def engine(params: Params, config: ModelConfig, executables: Executables) -> Engine:
    return engine_of(params, config, executables, 128)


@pytest.fixture
def asked(config: ModelConfig) -> list[Request]:
    sampling = SamplingParams(gen_length=8, block_length=4, early_stop=False, cache="dual")
    return [generation_request(i, np.arange(1, n), sampling, config) for i, n in enumerate((6, 20, 33))]


async def ended(engine: AsyncEngine, request: Request) -> Ended:
    async for update in engine.run(request.spec, updates="every"):
        if isinstance(update, Ended):
            return update
    raise AssertionError("no end")


def run(engine: Engine, asked: Sequence[Request], main: Any) -> Any:
    driver = AsyncEngine(engine)
    try:
        return asyncio.run(asyncio.wait_for(main(driver, asked), 60))
    finally:
        driver.close()


def test_many_at_once_give_what_each_gives_alone(engine: Engine, asked: list[Request]):
    expected = [finish(engine, [request])[1][0].tokens for request in asked]

    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> list[Ended]:
        return await asyncio.gather(*(ended(driver, request) for request in asked))

    found = run(engine, asked, main)
    assert [end.error for end in found] == [None] * 3
    for end, tokens in zip(found, expected, strict=True):
        np.testing.assert_array_equal(end.state.tokens, tokens)
    assert engine.stats().finished == 6


def test_those_that_are_submitted_together_hold_up_nobody(engine: Engine, config: ModelConfig):
    """Two of them are too long for one part, so one starts behind the other; a third starts at once."""
    sampling = SamplingParams(gen_length=8, block_length=4, early_stop=False)
    many, one = (
        [generation_request(i, np.arange(1, n), sampling, config) for i in range(4)] for n in (99, 9)
    )

    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> list[str]:
        order = []

        async def end(requests: Sequence[Request], name: str) -> None:
            with driver.submit([request.spec for request in requests]) as submitted:
                async for update in submitted:
                    order.extend([name] * isinstance(update, Ended))

        await asyncio.gather(end(asked[:-1], "many"), end(asked[-1:], "one"))
        return order

    assert "one" in run(engine, [*many, one[0]], main)[:2]


def test_leaving_or_cancelling_aborts(engine: Engine, asked: list[Request]):
    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> int:
        first = driver.run(asked[0].spec, updates="every")
        assert isinstance(await anext(first), StepUpdate)
        await first.aclose()
        task = asyncio.create_task(ended(driver, asked[1]))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return (await ended(driver, asked[2])).state.steps

    assert run(engine, asked, main) == 8
    stats = engine.stats()
    assert (stats.finished, stats.aborted) == (1, 2)
    assert stats.free_pages == stats.pages


def test_pages_of_a_cancelled_task_return_at_the_next_iteration(engine: Engine, asked: list[Request]):
    """Nobody else asks for anything; the engine is held in its first step while the task is cancelled."""
    going, reached = threading.Event(), threading.Event()

    def hold(_: PartDone) -> None:
        reached.set()
        going.wait(10)

    engine.observe = hold

    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> None:
        task = asyncio.create_task(ended(driver, asked[2]))
        assert await asyncio.to_thread(reached.wait, 10)
        assert engine.stats().free_pages < engine.stats().pages
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        going.set()
        while not engine.idle:
            await asyncio.sleep(0)

    run(engine, asked, main)
    stats = engine.stats()
    assert stats.free_pages == stats.pages
    assert (stats.aborted, stats.finished) == (1, 0)
    assert stats.evaluated == 1


def test_a_slow_reader_finds_an_update_for_each_step_and_the_end(engine: Engine, asked: list[Request]):
    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> list[Update]:
        updates = driver.run(asked[0].spec, updates="every")
        first = await anext(updates)
        while engine.stats().finished == 0:
            await asyncio.sleep(0.01)
        return [first, *[update async for update in updates]]

    *steps, end = run(engine, asked, main)
    assert [update.step for update in steps] == list(range(8))
    assert isinstance(end, Ended)


def test_a_reader_whose_loop_is_closed_harms_nobody(engine: Engine, asked: list[Request]):
    driver = AsyncEngine(engine)
    try:
        loop = asyncio.new_event_loop()
        left = driver.run(asked[0].spec, updates="every")
        loop.run_until_complete(anext(left))
        loop.close()
        end = asyncio.run(asyncio.wait_for(ended(driver, asked[1]), 60))
        with pytest.raises(StopIteration):
            left.aclose().send(None)
    finally:
        driver.close()
    assert end.error is None
    assert driver.error is None


class Deaths:
    """Notes what `on_dead` is called with, and what the engine had told by then."""

    def __init__(self, engine: Engine):
        self.errors: list[Exception] = []
        self.left: list[int] = []
        self.driver = AsyncEngine(engine, on_dead=self)
        self._engine = engine

    def __call__(self, error: Exception) -> None:
        self.errors.append(error)
        self.left.append(len(self._engine.requests()))


def die(engine: Engine, asked: Sequence[Request]) -> tuple[Deaths, list[Ended], Exception]:
    """How two requests end, and what a third one meets."""
    deaths = Deaths(engine)

    async def main() -> tuple[list[Ended], Exception]:
        ends = await asyncio.gather(*(ended(deaths.driver, request) for request in asked[:2]))
        with pytest.raises(Exception) as late:  # noqa: PT011  # told apart below
            await ended(deaths.driver, asked[2])
        return ends, late.value

    try:
        ends, late = asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        deaths.driver.close()
    return deaths, ends, late


def test_an_engine_that_cannot_go_on_ends_all_and_says_so(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch
):
    def broken() -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine.scheduler, "admit", broken)
    deaths, ends, late = die(engine, asked)
    assert [str(end.error) for end in ends] == ["broken"] * 2
    assert deaths.driver.error is late
    assert deaths.errors == [late]
    assert deaths.left == [0]
    monkeypatch.undo()
    assert finish(engine, asked[:1])[1][0].finished  # whoever drives it in another way may go on


def test_all_are_told_although_the_engine_cannot_even_be_cleaned_up(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    def cannot(*_: Any) -> Any:
        raise ValueError("cannot be cleaned up")

    monkeypatch.setattr(engine.scheduler, "plan", broken)
    monkeypatch.setattr(engine.scheduler, "remove", cannot)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    deaths, ends, late = die(engine, asked)
    assert [str(end.error) for end in ends] == ["broken"] * 2
    assert deaths.errors == [late]


def failing_once(engine: Engine, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Let the first part fail where the runner's `submit` or `collect` is called."""
    method, failures = getattr(engine.runner, call), iter([RuntimeError("the device failed")])

    def failing(*arguments: Any) -> Any:
        if (error := next(failures, None)) is not None:
            raise error
        return method(*arguments)

    monkeypatch.setattr(engine.runner, call, failing)


@pytest.mark.parametrize("call", ["submit", "collect"])
def test_a_part_that_fails_on_a_device_that_answers_is_not_the_end(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch, call: str
):
    failing_once(engine, monkeypatch, call)

    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> tuple[Ended, Ended, Any]:
        return await ended(driver, asked[0]), await ended(driver, asked[1]), driver.error

    failed, other, error = run(engine, asked, main)
    assert str(failed.error) == "the device failed"
    assert other.error is None
    assert error is None


@pytest.mark.parametrize("call", ["submit", "collect"])
def test_a_device_that_does_not_answer_after_a_failed_part_is_the_end(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch, call: str
):
    """Requests of other parts end too: none of them would ever be served."""

    def silent(*_: Any) -> Any:
        raise RuntimeError("an illegal address was met")

    failing_once(engine, monkeypatch, call)
    monkeypatch.setattr("jdllm.serving.runner.jax.device_put", silent)
    deaths, ends, late = die(engine, asked)
    message = "the device does not answer any more: an illegal address was met"
    assert [str(end.error) for end in ends] == [message] * 2
    assert str(late) == message
    assert deaths.errors == [deaths.driver.error]
    stats = engine.stats()
    assert (stats.failed, stats.free_pages) == (2, stats.pages)


def test_what_is_on_its_way_is_waited_for(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch
):
    """Two requests arrive apart, and run in step: as many evaluations as one of them takes."""
    monkeypatch.setattr(async_engine, "GATHERED", 4.0)

    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> None:
        with driver.expecting():
            first = asyncio.create_task(ended(driver, asked[0]))
            await asyncio.sleep(0.05)
            assert engine.stats().evaluated == 0
            second = asyncio.create_task(ended(driver, asked[1]))
            while len(engine.requests()) < 2:
                await asyncio.sleep(0)
        await asyncio.gather(first, second)

    run(engine, asked, main)
    assert engine.stats().evaluated == 8


def test_one_that_follows_closely_is_company(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch
):
    """The second arrives when the first is already submitted and nobody is known to be on the way."""
    monkeypatch.setattr(async_engine, "QUIET", 2.0)
    monkeypatch.setattr(async_engine, "GATHERED", 4.0)

    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> None:
        first = asyncio.create_task(ended(driver, asked[0]))
        await asyncio.sleep(0.05)
        await asyncio.gather(first, ended(driver, asked[1]))

    run(engine, asked, main)
    assert engine.stats().evaluated == 8


def test_nobody_waits_for_company_when_closed(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(async_engine, "QUIET", 1000.0)
    monkeypatch.setattr(async_engine, "GATHERED", 1000.0)
    driver = AsyncEngine(engine)

    async def main() -> None:
        with driver.submit([asked[0].spec]):
            await asyncio.sleep(0.05)

    asyncio.run(main())
    driver.close()


def test_nobody_waits_long_for_what_does_not_come(engine: Engine, asked: list[Request]):
    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> Ended:
        with driver.expecting():
            return await ended(driver, asked[0])

    assert run(engine, asked, main).error is None
