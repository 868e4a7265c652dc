"""`jdllm serve --replicas`: several servers behind one port answer as one does, and outlive each other."""

import os
import signal
from typing import Any

import pytest

from tests.api.sse import events
from tests.clients.servers import Server, Starter, until
from tests.ray.asking import Asking, completed, cpu_seconds, replicas_of

SAMPLED = {"temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def server(start_server: Starter) -> Server:
    """A replica, and another one that many requests have started."""
    options = ["--replicas", "1", "--max-replicas", "2", "--target-ongoing-requests", "1"]
    server = start_server("--no-warmup", *options).ready()
    assert len(replicas_of(server.pid)) == 1
    asked: list[Asking] = []

    def another() -> bool:
        asked.extend(Asking(server.url) for _ in range(4 - sum(one.is_alive() for one in asked)))
        return len(replicas_of(server.pid)) == 2

    until(another, 90.0)
    for one in asked:
        assert one.done().completion()[0]
    return server


def post(server: Server, path: str, **body: Any) -> str:
    with server.client() as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert len(answer.headers.get_list("x-request-id")) == 1
        return answer.text


def streamed(server: Server, path: str, **body: Any) -> tuple[str, str, Any]:
    """What a stream says: the text, why it ends, and the usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 32}
    told = [data for _, data in events(post(server, path, **SAMPLED, **options, **body))]
    choices = [choice for data in told for choice in data["choices"]]
    parts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    return "".join(parts), choices[-1]["finish_reason"], told[-1]["usage"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "123+456="}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "12+30="}]}),
    ],
)
def test_streams_are_those_of_a_plain_server(server: Server, plain: Server, path: str, body: dict[str, Any]):
    expected = streamed(plain, path, **body)
    assert expected[0]
    for _ in range(4):  # both replicas, most likely
        assert streamed(server, path, **body) == expected


def test_a_killed_replica_takes_no_request_along_that_had_not_begun_to_stream(server: Server, plain: Server):
    seeds = range(2)
    expected = [completed(plain, temperature=0.8, seed=seed) for seed in seeds]
    replicas = killed, kept = replicas_of(server.pid)
    before = [cpu_seconds(pid) for pid in replicas]

    def ask(stream: bool) -> list[tuple[str, Asking]]:
        return [
            (expected[seed], Asking(server.url, temperature=0.8, seed=seed, stream=stream)) for seed in seeds
        ]

    # One step of a replica serves half of them, so they go on together.
    streams, whole = ask(True) + ask(True), ask(False) + ask(False)
    until(lambda: all(one.begun for _, one in streams), 60.0)
    late = ask(True)
    assert not any(one.text for _, one in whole)
    assert min(cpu_seconds(pid) - spent for pid, spent in zip(replicas, before, strict=True)) > 0.5  # both
    os.kill(killed, signal.SIGKILL)
    for text, one in whole:
        assert one.done().completion() == (text, None)
    codes = []
    for text, one in streams + late:
        told, code = one.done().completion()
        assert one.status == 200
        assert (told, code) == (text, None) or (one.begun and text.startswith(told) and code == "server_died")
        codes.append(code)
    assert set(codes) == {None, "server_died"}
    until(lambda: len(replicas_of(server.pid)) == 2, 60.0)
    assert kept in replicas_of(server.pid)


def test_a_signal_lets_what_runs_finish(server: Server, plain: Server):
    expected = completed(plain)
    asked = [Asking(server.url, stream=stream) for stream in (True, False, True, False)]
    until(lambda: all(one.begun for one in asked[::2]), 60.0)
    server.process.send_signal(signal.SIGTERM)
    assert [one.done().completion() for one in asked] == [(expected, None)] * 4
    assert server.process.wait(60.0) == 0
    assert not replicas_of(server.pid)


def test_a_model_that_does_not_fit_is_said_in_the_end(start_server: Starter):
    server = start_server("--max-replicas", "2", "--memory", "1MiB")
    assert server.process.wait(120.0) == 2
    [line] = [line for line in server.log.read_text().splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the replicas do not start: ")
    assert "leave 0 B of the memory, 1.00 MiB" in line
