"""Static batches: who shares one, when they are answered, and what a load on their server comes to."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from benchmarks.record import RESULTS
from benchmarks.serving import STATIC, put_load, served
from benchmarks.serving_loads import Load
from benchmarks.static_batcher import Batches, application
from jdllm.api.service import Settings
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.errors import RequestError
from jdllm.llm import LLM
from tests.conftest import KV_POOL

SHORT, LONG = SamplingParams(gen_length=8), SamplingParams(gen_length=16)


class Generator:
    """Takes the place of `LLM.generate`: keeps what it is called with, and ends a call when it is told."""

    def __init__(self):
        self.calls: list[tuple[list[list[int]], list[SamplingParams]]] = []
        self.end = threading.Semaphore(0)

    def __call__(self, *, prompt_token_ids: list[list[int]], sampling: list[SamplingParams]) -> list[Any]:
        self.calls.append((prompt_token_ids, sampling))
        assert self.end.acquire(timeout=10)
        if [0] in prompt_token_ids:
            raise RequestError("a prompt is wrong")
        return [f"of {ids}" for ids in prompt_token_ids]


async def until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError


def put(batches: Batches, prompts: Sequence[int], sampling: SamplingParams) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(batches.answer([ids], sampling)) for ids in prompts]


def test_a_batch_waits_for_the_one_before():
    async def check() -> None:
        generate = Generator()
        batches = Batches(generate, 3)
        running = asyncio.create_task(batches.run())
        first = put(batches, [1, 2, 3, 4], SHORT)
        await until(lambda: len(generate.calls) == 1)
        late = put(batches, [5], LONG)
        await asyncio.sleep(0.1)
        assert generate.calls == [([[1], [2], [3]], [SHORT] * 3)]
        assert not any(one.done() for one in first)
        generate.end.release()
        await until(lambda: len(generate.calls) == 2)
        assert [one.result() for one in first[:3]] == ["of [1]", "of [2]", "of [3]"]
        assert generate.calls[1] == ([[4], [5]], [SHORT, LONG])
        assert not first[3].done()
        generate.end.release()
        assert await asyncio.gather(first[3], *late) == ["of [4]", "of [5]"]
        running.cancel()

    asyncio.run(check())


def test_a_batch_that_fails_is_answered_and_the_next_one_runs():
    async def check() -> None:
        generate = Generator()
        batches = Batches(generate, 2)
        running = asyncio.create_task(batches.run())
        asked = put(batches, [1, 0, 2], SHORT)
        generate.end.release(2)
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
        assert [str(one) for one in answers] == ["a prompt is wrong", "a prompt is wrong", "of [2]"]
        running.cancel()

    asyncio.run(check())


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(checkpoint_path(), dtype="float32", max_num_batched_tokens=256, kv_pool=KV_POOL) as llm:
        yield llm


@pytest.fixture
def client(demo: LLM) -> Iterator[TestClient]:
    settings = Settings(names=("demo",), default_sampling=demo.default_sampling())
    with application(demo, settings, 4) as app, TestClient(app) as client:
        yield client


def test_it_answers_what_the_library_generates(client: TestClient, demo: LLM):
    body = {"model": "demo", "prompt": [49, 43, 50, 61], "max_tokens": 8, "ignore_eos": True, "cache": "dual"}
    answer = client.post("/v1/completions", json=body).json()
    sampling = SamplingParams(gen_length=8, early_stop=False, cache="dual")
    expected = demo.generate(prompt_token_ids=[body["prompt"]], sampling=sampling)[0]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["nfe"]) == (expected.text, "length", 8)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["forward_evaluations"]) == (4, 8, 8)
    assert client.get("/v1/stats").json()["evaluated"] == demo.engine.evaluated


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stream": True}, "stream"),
        ({"prompt": "1+2="}, "token ids"),
        ({"prompt": [[1], [2]]}, "token ids"),
        ({"max_tokens": 600}, "longer than"),
        ({"temperatur": 1}, "temperature"),
        ({"model": "other"}, "no model"),
    ],
)
def test_what_it_cannot_answer_is_refused(client: TestClient, fields: dict[str, Any], told: str):
    answer = client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 8, **fields})
    assert answer.status_code in (400, 404)
    assert told in answer.json()["error"]["message"]


def test_a_load_on_it_has_a_row_like_others(tmp_path: Path):
    (recorded, *_) = json.loads((RESULTS / "serving_llada-8b_arrivals.json").read_text())["rows"]
    three = Load("three", {"block_length": 8}, 3, ("--prompt-length", "5", "--stream-mode", "denoise"))
    with served(checkpoint_path(), 256, tmp_path, ["--batch", "2"], STATIC) as server:
        row = put_load(server["url"], three.whole, 16)
    assert {"shape", "through", *row} == recorded.keys()
    assert (row["completed"], row["failed"], row["other_length"], row["other_nfe"]) == (3, 0, 0, 0)
    assert row["evaluated"] == 2 * 16, "the third waits for both others"
    assert row["stream"] is None
    assert row["time_to_first_block_mean_s"] is None
