"""Loads on a server on loopback, and on one that holds this process up."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from jdllm.bench.answers import Answer
from jdllm.bench.client import Client
from jdllm.bench.form import Form
from jdllm.bench.load import Ask, Load
from jdllm.bench.records import Record
from jdllm.bench.run import Options, Run, run
from jdllm.bench.summary import summarize
from jdllm.bench.trace import Arrival, Trace
from jdllm.bench.workload import cycled, parse_lengths, poisson_arrivals
from jdllm.errors import RequestError
from tests.bench.fake_server import BLOCK, MASK_ID, VOCAB_SIZE, FakeServer

TOKENS = 2 * BLOCK


def options(fake: FakeServer, **others: Any) -> Options:
    values: dict[str, Any] = {
        "url": fake.url,
        "api_key": None,
        "model": None,
        "endpoint": "completions",
        "stream": "text",
        "requests": 12,
        "warmup": 0,
        "lengths": parse_lengths("3:9"),
        "gen_length": TOKENS,
        "sampling": {"steps": TOKENS, "block_length": BLOCK},
        "seed": 0,
        "rate": None,
        "concurrency": None,
        "vocab_size": None,
    }
    return Options(**(values | others))


def done(fake: FakeServer, **others: Any) -> Run:
    return asyncio.run(run(options(fake, **others)))


def test_a_closed_loop_keeps_so_many_under_way(fake: FakeServer):
    fake.block_seconds = 0.02
    found = done(fake, concurrency=3)
    summary = summarize(found.records)
    assert (summary.completed, summary.requests, found.model) == (12, 12, "first")
    assert (fake.most, summary.max_concurrency) == (3, 3)
    assert summary.duration >= 4 * 2 * fake.block_seconds
    assert summary.generated_tokens == 12 * TOKENS
    assert (summary.other_length, summary.other_nfe) == (0, 0)
    assert sorted(r.index for r in found.records) == list(range(12))


def test_a_closed_loop_sends_all_at_once(fake: FakeServer):
    fake.block_seconds = 0.3
    assert summarize(done(fake).records).max_concurrency == fake.most == 12


def test_requests_are_what_was_asked_for(fake: FakeServer):
    lengths = parse_lengths("500:600")
    done(fake, requests=4, lengths=lengths, sampling={"cache": "dual", "steps": TOKENS})
    for body in fake.bodies:
        prompt = body.pop("prompt")
        assert 500 <= len(prompt) <= 600
        assert set(prompt) == set(range(VOCAB_SIZE // 2)) - {MASK_ID}
        assert body == {
            "model": "first",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "cache": "dual",
            "steps": TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


@pytest.mark.parametrize("stream", ["text", "denoise"])
def test_streams_tell_of_first_texts_and_blocks(stream: Any, fake: FakeServer):
    fake.block_seconds = 0.05
    found = done(fake, requests=3, stream=stream, sampling={"block_length": BLOCK})
    for r in found.records:
        assert r.time_to_first_text is not None
        assert r.time_to_first_block is not None
        assert 0.05 <= r.time_to_first_text <= r.time_to_first_block < r.latency
        assert (r.status, r.completion_tokens, r.finish_reason) == ("completed", TOKENS, "length")
        assert r.nfe == (TOKENS if stream == "text" else TOKENS // 2)


def test_answers_in_one_piece_tell_of_no_first_block(fake: FakeServer):
    found = done(fake, requests=3, stream=None)
    assert [r.status for r in found.records] == ["completed"] * 3
    assert {r.nfe for r in found.records} == {TOKENS}
    assert {r.time_to_first_text for r in found.records} == {None}
    assert {r.time_to_first_block for r in found.records} == {None}
    assert "stream" not in fake.bodies[0]


@pytest.mark.parametrize("stream", ["text", None])
def test_chat_asks_with_the_texts_of_the_ids(stream: Any, fake: FakeServer):
    found = done(fake, requests=3, stream=stream, endpoint="chat")
    for r, body in zip(sorted(found.records, key=lambda r: r.index), fake.bodies, strict=True):
        (message,) = body["messages"]
        words = message["content"].split()
        assert message["role"] == "user"
        assert all(0 <= int(word.removeprefix("w")) < VOCAB_SIZE // 2 for word in words)
        assert r.prompt_tokens == len(words) + 3  # as the server counts
        assert (r.time_to_first_text is None) == (stream is None)


def test_an_open_loop_sends_at_its_arrivals_however_slow_the_server_is(fake: FakeServer):
    fake.block_seconds = 0.03
    fake.capacity = 1
    found = done(fake, rate=100.0)
    arrivals = poisson_arrivals(100.0, 12, seed=0)
    records = sorted(found.records, key=lambda r: r.index)
    assert [r.scheduled for r in records] == arrivals
    assert all(r.sent >= r.scheduled for r in records)
    # One after the other: whoever ends as the k-th has waited for k services.
    for k, r in enumerate(sorted(records, key=lambda r: r.ended), start=1):
        assert r.ended >= arrivals[0] + k * 2 * fake.block_seconds
    assert fake.most > 3
    first, second = summarize(records).halves
    assert first is not None
    assert second is not None
    assert second > first


def replayed(fake: FakeServer, *arrivals: Arrival, **others: Any) -> list[Record]:
    """Records of the requests of a trace, in the order of their arrivals."""
    trace = Trace(Path("trace.jsonl"), arrivals)
    lengths = cycled(trace.prompt_lengths)
    found = done(fake, requests=len(arrivals), lengths=lengths, trace=trace, **others)
    return sorted(found.records, key=lambda r: r.index)


BURST = (
    Arrival(1, 0.0, 5, TOKENS),
    Arrival(2, 0.0, 9, 3 * BLOCK),
    Arrival(3, 0.25, 3, None),
    Arrival(4, 0.3, 7, BLOCK),
)
"""Arrivals whose lengths differ; the third generates what the load says."""


@pytest.mark.parametrize(
    ("steps", "asked"), [(TOKENS, [8, 12, 8, 4]), (BLOCK, [4, 6, 4, 2]), (None, [None] * 4)]
)
def test_a_trace_is_replayed_with_its_arrivals_lengths_and_steps(
    steps: int | None, asked: list[int | None], fake: FakeServer
):
    fields = {} if steps is None else {"steps": steps}
    records = replayed(fake, *BURST, sampling={"block_length": BLOCK, **fields})
    assert [r.scheduled for r in records] == [0.0, 0.0, 0.25, 0.3]
    assert all(r.scheduled <= r.sent < r.scheduled + 0.2 for r in records)
    assert [r.prompt_tokens for r in records] == [5, 9, 3, 7]
    assert [r.asked_tokens for r in records] == [r.completion_tokens for r in records] == [8, 12, 8, 4]
    assert [r.steps for r in records] == asked
    bodies = sorted((len(b["prompt"]), b["max_tokens"], b.get("steps")) for b in fake.bodies)
    assert bodies == sorted(zip([5, 9, 3, 7], [8, 12, 8, 4], asked, strict=True))


@pytest.mark.parametrize(("steps", "other"), [(TOKENS, 0), (BLOCK, 4), (None, 0)])
def test_a_summary_counts_the_steps_of_each_length(steps: int | None, other: int, fake: FakeServer):
    """The server evaluates once for each token."""
    fields = {} if steps is None else {"steps": steps}
    summary = summarize(replayed(fake, *BURST, sampling=fields))
    assert (summary.completed, summary.other_length, summary.other_nfe) == (4, 0, other)
    assert summary.generated_tokens == summary.nfe == 8 + 12 + 8 + 4


def test_a_rule_that_takes_what_it_needs_has_no_steps(fake: FakeServer):
    records = replayed(fake, *BURST, sampling={"transfer": "threshold", "threshold": 0.9})
    assert {r.steps for r in records} == {None}


def test_a_trace_begins_again_for_the_warmup(fake: FakeServer):
    records = replayed(fake, *BURST[:2], warmup=3)
    assert [r.index for r in records] == [0, 1]
    sent = [(len(b["prompt"]), b["max_tokens"]) for b in fake.bodies]
    assert sorted(sent[:3]) == [(5, 8), (5, 8), (9, 12)]
    assert sorted(sent[3:]) == [(5, 8), (9, 12)]


class HoldingUp:
    """A client that holds the event loop for a while with each request."""

    async def generate(self, form: Form, body: bytes) -> Answer:
        time.sleep(0.05)
        return Answer(1, 1, "length", 1)


def test_latencies_of_an_open_loop_count_from_the_arrival():
    load = Load(cast(Client, HoldingUp()), Form("m", "completions", None, 1, {}), time.perf_counter)
    asyncio.run(load.open([Ask(i, b"", 1, 1, None) for i in range(5)], [0.0] * 5))
    for r in load.records:
        assert r.latency >= 0.05 * (r.index + 1)
        assert r.sent >= 0.05 * r.index
    assert summarize(load.records).send_delay >= 0.2


def test_what_the_server_refuses_or_drops_is_counted_with_its_message(fake: FakeServer):
    faults = ["refuse", "crash", "drop", "error", "endless", "uncounted", "short", None]
    fake.fault = lambda number: faults[number]
    found = done(fake, requests=8, concurrency=1)
    errors = {r.index: str(r.error) for r in found.records if r.status == "failed"}
    assert errors.pop(2, "").startswith("RemoteProtocolError: ")
    assert errors == {
        0: "HTTP 429: the queue is full",
        1: "HTTP 500: Internal Server Error",
        3: "a step failed",
        4: "the stream ended without [DONE]",
        5: "the answer has no usage: its tokens cannot be counted",
    }
    summary = summarize(found.records)
    assert (summary.completed, summary.failed, summary.other_length) == (2, 6, 1)
    assert summary.generated_tokens == 2 * TOKENS - 1


def test_failures_of_denoising_streams_and_whole_answers(fake: FakeServer):
    fake.fault = lambda _: "error"
    assert {r.error for r in done(fake, requests=2, stream="denoise").records} == {"a step failed"}
    fake.fault = lambda _: "uncounted"
    (error,) = {r.error for r in done(fake, requests=2, stream=None).records}
    assert error is not None
    assert "no usage" in error


def test_an_answer_of_another_shape_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": [5], "usage": {"completion_tokens": 1}})

    monkeypatch.setattr(httpx, "AsyncHTTPTransport", lambda **_: httpx.MockTransport(answer))

    async def ask() -> None:
        client = Client("http://there", None, time.perf_counter)
        load = Load(client, Form("m", "completions", None, 1, {}), time.perf_counter)
        async with client:
            await load.closed([Ask(0, b"{}", 3, 1, None)], 1)
        (record,) = load.records
        assert record.status == "failed"
        assert record.error is not None
        assert "another shape" in record.error
        assert record.prompt_tokens == 3

    asyncio.run(ask())


def test_warmup_goes_before_and_is_not_timed(fake: FakeServer):
    plain, warmed = done(fake, requests=3), done(fake, requests=3, warmup=4)
    assert len(warmed.records) == 3
    sent = [body["prompt"] for body in fake.bodies]
    assert len(sent) == 3 + 4 + 3
    assert sorted(sent[:3]) == sorted(sent[-3:])
    assert not [prompt for prompt in sent[3:7] if prompt in sent[:3]]
    assert plain.server is not None
    assert warmed.server is not None
    assert plain.server["evaluated"] == warmed.server["evaluated"] == 3 * TOKENS


def test_counters_of_the_server_are_differences(fake: FakeServer):
    found = done(fake, requests=2)
    assert found.server == {
        "compiled": 0,
        "evaluated": 2 * TOKENS,
        "rows": {"full": 20 * TOKENS, "reuse": 0},
    }


def test_the_key_and_the_model_are_sent(fake: FakeServer):
    fake.key = "s3cret"
    found = done(fake, requests=2, api_key="s3cret", model="second")
    assert fake.authorizations == ["Bearer s3cret"] * 2
    assert found.model == "second"
    assert {body["model"] for body in fake.bodies} == {"second"}


def test_a_server_without_a_tokenizer_needs_the_size_of_the_vocabulary(fake: FakeServer):
    fake.tokenizer = False
    with pytest.raises(RequestError, match="HTTP 400: the model has no tokenizer: give --vocab-size"):
        done(fake)
    done(fake, vocab_size=8, lengths=parse_lengths("50"))
    assert {i for body in fake.bodies for i in body["prompt"]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"url": "http://127.0.0.1:1"}, "there is no server at http://127.0.0.1:1"),
        ({"url": "127.0.0.1:8000"}, "--url is"),
        ({"url": "ftp://127.0.0.1"}, "--url is"),
        ({"url": "http://127.0.0.1:port"}, "--url"),
        ({"api_key": "ключ"}, "--api-key"),
        ({"model": "third"}, "no model 'third', expected one of first, second"),
    ],
)
def test_mistakes_end_a_run_before_it_begins(others: dict[str, Any], message: str, fake: FakeServer):
    with pytest.raises(RequestError, match=message):
        done(fake, **others)
    assert fake.bodies == []


def test_a_wrong_key_is_told_of_at_once(fake: FakeServer):
    fake.key = "s3cret"
    with pytest.raises(RequestError, match=r"HTTP 401: there is no such key \(--api-key\)"):
        done(fake)


def test_being_cancelled_keeps_what_there_is(fake: FakeServer):
    fake.block_seconds = 0.05
    ended: list[Record] = []

    async def interrupted() -> Run:
        task = asyncio.current_task()
        assert task is not None

        def told(record: Record) -> None:
            ended.append(record)
            if len(ended) == 2:
                task.cancel()

        return await run(options(fake, concurrency=2), told)

    found = asyncio.run(interrupted())
    assert found.interrupted
    assert found.records == ended
    statuses = [r.status for r in found.records]
    assert statuses[:2] == ["completed", "completed"]
    assert set(statuses[2:]) <= {"cancelled"}
    assert len(found.records) < 12
