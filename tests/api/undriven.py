"""A server whose engine nobody drives: its calls wait until they are ended."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator

from jdllm.api.service import Service
from jdllm.serving.async_engine import AsyncEngine


@contextlib.contextmanager
def undriven(service: Service, **settings: int) -> Iterator[Service]:
    """As `service`, with some settings of its own."""
    engine = AsyncEngine(service.llm.engine)
    engine.close()
    told = dataclasses.replace(service.settings, **settings)
    waiting = Service(service.llm, engine, told, service.metrics)
    try:
        yield waiting
    finally:
        waiting.close()


async def stop_once_asked(service: Service, seconds: float = 0.0) -> None:
    """Stop a server so long after its first call."""
    while not service.running:
        await asyncio.sleep(0.01)
    await asyncio.sleep(seconds)
    service.stop()
