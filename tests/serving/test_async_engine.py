"""The engine for asyncio: many at once, cancelled ones, failures."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jdllm.decoding.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.async_engine import AsyncEngine
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended, StepUpdate
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


def test_what_goes_wrong_in_the_engine_ends_its_requests(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch
):
    def broken() -> Any:
        raise RuntimeError("broken")

    async def main(driver: AsyncEngine, asked: Sequence[Request]) -> list[Ended]:
        return await asyncio.gather(*(ended(driver, request) for request in asked[:2]))

    monkeypatch.setattr(engine._scheduler, "admit", broken)
    assert [str(end.error) for end in run(engine, asked, main)] == ["broken"] * 2
    monkeypatch.undo()
    assert finish(engine, asked[:1])[1][0].finished
