"""Updates of a call in its event loop: as they happen, or gathered."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.serving.engine import Engine, Updates
from jdllm.serving.request import Request
from jdllm.serving.spec import RequestSpec, generation_spec
from jdllm.serving.submitted import Submitted
from jdllm.serving.updates import Ended, StepUpdate, Update


class Told:
    """Stands for an engine: keeps how its one request is told of updates."""

    def __init__(self):
        self.deliver: Callable[[Update], None] = lambda _: None

    def new_call(self) -> int:
        return 0

    def add(self, spec: RequestSpec, *, deliver: Callable[[Update], None], **_: Any) -> int:
        self.deliver = deliver
        return 0

    def abort(self, request: int) -> None: ...


def step(number: int) -> StepUpdate:
    nothing = np.zeros(0, np.int32)
    return StepUpdate(0, number, nothing, nothing, nothing.astype(bool), nothing.astype(np.float32))


@pytest.fixture
def spec(config: ModelConfig) -> RequestSpec:
    return generation_spec([1, 2], SamplingParams(gen_length=4), config)


async def told_at_once(spec: RequestSpec, updates: Updates) -> list[int]:
    """How many updates have been read after each of three steps and after the end."""
    engine, read = Told(), []
    with Submitted(cast(Engine, engine), [spec], updates) as submitted:

        async def reader() -> None:
            async for update in submitted:
                read.append(update)

        task = asyncio.create_task(reader())
        counts = []
        for update in (*map(step, range(3)), Ended(0, Request(spec), None)):
            await asyncio.to_thread(engine.deliver, update)
            await asyncio.sleep(0.005)
            counts.append(len(read))
        await task
    assert [update.step for update in read[:-1]] == [0, 1, 2]
    assert isinstance(read[-1], Ended)
    return counts


def test_every_update_comes_as_it_happens(spec: RequestSpec):
    assert asyncio.run(told_at_once(spec, "every")) == [1, 2, 3, 4]


def test_later_updates_are_gathered_behind_the_first_until_the_end(spec: RequestSpec):
    assert asyncio.run(told_at_once(spec, "later")) == [1, 1, 1, 4]


def test_gathered_updates_come_without_a_further_one(spec: RequestSpec):
    async def main() -> list[int]:
        engine, read = Told(), []
        with Submitted(cast(Engine, engine), [spec], "later") as submitted:
            for number in range(3):
                await asyncio.to_thread(engine.deliver, step(number))
            async with asyncio.timeout(5):
                while len(read) < 3:
                    read.append(cast(StepUpdate, await anext(submitted)).step)
        return read

    assert asyncio.run(main()) == [0, 1, 2]


def test_no_update_is_lost_between_two_times(spec: RequestSpec):
    """Updates come at any moment between two times at which the loop is woken, also at these."""

    async def main() -> int:
        engine, count = Told(), 200
        with Submitted(cast(Engine, engine), [spec], "later") as submitted:

            async def tell() -> None:
                for number, pause in zip(range(count), itertools.cycle((0, 0.001, 0.003)), strict=False):
                    await asyncio.to_thread(engine.deliver, step(number))
                    await asyncio.sleep(pause)

            telling = asyncio.create_task(tell())
            async with asyncio.timeout(20):
                for number in range(count):
                    assert cast(StepUpdate, await anext(submitted)).step == number
            await telling
        return count

    assert asyncio.run(main()) == 200
