"""The bundled model behind the application, in this process."""

from collections.abc import Iterator

import jax
import pytest
from fastapi.testclient import TestClient

from jdllm.api.app import create_app
from jdllm.api.metrics import Metrics
from jdllm.api.service import Service, Settings
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.demo import checkpoint_path
from jdllm.llm import LLM
from jdllm.serving.async_engine import AsyncEngine
from tests.conftest import KV_POOL

NAME = "demo"
ROWS = 256


def existing[T](value: T | None) -> T:
    """What the bundled model has."""
    assert value is not None
    return value


@pytest.fixture(autouse=True)
def _optimised(request: pytest.FixtureRequest) -> Iterator[None]:
    """The bundled model runs longer in these tests than it compiles; the tiny ones do not."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before and "demo" not in request.fixturenames)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="package")
def demo() -> Iterator[LLM]:
    with LLM(checkpoint_path(), dtype="float32", max_num_batched_tokens=ROWS, kv_pool=KV_POOL) as llm:
        yield llm


@pytest.fixture(scope="package")
def tokenizer(demo: LLM) -> Tokenizer:
    return existing(demo.tokenizer)


@pytest.fixture(scope="package")
def mask_id(demo: LLM) -> int:
    return existing(demo.config.mask_id)


@pytest.fixture(scope="package")
def service(demo: LLM) -> Iterator[Service]:
    engine = AsyncEngine(demo.engine)
    settings = Settings(names=(NAME, "also"), default_sampling=demo.default_sampling(), max_queue=64)
    metrics = Metrics(NAME, demo.engine, demo.executables)
    demo.engine.observe = metrics.observe_part
    made = Service(demo, engine, settings, metrics)
    yield made
    made.close()
    engine.close()


@pytest.fixture(scope="package")
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(create_app(service)) as client:
        yield client
