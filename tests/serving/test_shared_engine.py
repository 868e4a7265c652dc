"""A short request beside a call of many samples, on an engine that clients share."""

from collections.abc import Iterator

import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.llm import LLM
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.spec import RequestSpec, generation_spec
from jdllm.serving.updates import Ended, PartDone, Update
from tests.conftest import KV_POOL

MANY, ROWS, TILES = 200, 512, 16
"""Samples of the call; rows of a step, in which as many requests reuse as there are tiles."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(checkpoint_path(), dtype="float32", max_num_batched_tokens=ROWS, kv_pool=KV_POOL) as llm:
        yield llm


def spec(llm: LLM, length: int, steps: int, seed: int = 0) -> RequestSpec:
    sampling = SamplingParams(
        gen_length=length, steps=steps, cache="dual", temperature=1.0, seed=seed, early_stop=False
    )
    return generation_spec([1, 2, 3], sampling, llm.config)


@pytest.fixture
def engine(llm: LLM) -> Iterator[Engine]:
    """A call of many samples runs in it, and more of these have places than a part of reuses holds."""
    engine = llm.engine
    engine.scheduler.share()
    call, parts = engine.new_call(), list[PartDone]()
    engine.observe = parts.append
    many = [engine.add(spec(llm, 16, 16, seed), call=call, updates="none") for seed in range(MANY)]
    while not any(part.kind is Kind.REUSE for part in parts):
        engine.step()
    assert len(engine.scheduler.running) > TILES
    engine.observe = None
    yield engine
    for request in many:
        engine.abort(request)
    while not engine.idle:
        engine.step()


def test_a_short_request_starts_at_once_and_waits_for_few_parts(llm: LLM, engine: Engine):
    """It has four steps. Between two of them each other request has at most one reuse. The part in flight and
    two more hold these, and there are at most as many refreshes."""
    parts, told = list[PartDone](), list[Update]()
    engine.observe = parts.append
    short = engine.add(spec(llm, 8, 4), deliver=told.append)
    engine.step()
    assert short in engine.scheduler.running
    while not any(isinstance(update, Ended) for update in told):
        engine.step()
    assert sum(short in part.ids for part in parts) == 4
    assert len(parts) <= 4 * 2 * 3
    assert all(part.steps == 1 for part in parts[1:])
