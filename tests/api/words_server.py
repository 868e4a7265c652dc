"""A server of a model that reads and writes words."""

import contextlib
from collections.abc import Iterator

from fastapi.testclient import TestClient

from jdllm.api.app import create_app
from jdllm.api.metrics import Metrics
from jdllm.api.service import Service, Settings
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.serving.async_engine import AsyncEngine


@contextlib.contextmanager
def served(llm: LLM, sampling: SamplingParams | None = None) -> Iterator[TestClient]:
    """A client of `llm` behind the server, with default parameters of its own where they are given."""
    engine, metrics = AsyncEngine(llm.engine), Metrics("words", llm.engine, llm.executables)
    settings = Settings(names=("words",), default_sampling=sampling or llm.default_sampling())
    service = Service(llm, engine, settings, metrics)
    with TestClient(create_app(service)) as client:
        yield client
    service.close()
    engine.close()
