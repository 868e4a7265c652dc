"""Routers that we did not write, in front of two servers of ours."""

import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.api.sse import events
from tests.clients.servers import MODEL, Server, Starter, until

pytestmark = pytest.mark.clients

MODULES = {"vllm-router": "vllm_router.launch_router", "sglang-router": "sglang_router.launch_router"}
KEY = "key-of-the-routers"
SUMS = {"123+456=": "579", "12+30=": "42"}
"""Prompts that the bundled model answers rightly."""

SHORT = {"model": MODEL, "max_tokens": 8, "temperature": 0}
RUNNING = {
    **{"model": MODEL, "prompt": "123+456=", "temperature": 0},
    **{"gen_length": 128, "steps": 128, "block_length": 8, "early_stop": False},
}
"""A request that takes some seconds, and streams its first text early."""

Start = Callable[[], Server]


@pytest.fixture(scope="module")
def start_worker(start_server: Starter) -> Start:
    """Starts a server, which compiles a step when it first needs the step."""
    return lambda: start_server("--no-warmup", api_key=KEY)


@pytest.fixture(scope="module")
def workers(start_worker: Start) -> Iterator[list[Server]]:
    started = [start_worker() for _ in range(2)]
    yield [server.ready() for server in started]
    for server in started:
        server.end()


@pytest.fixture
def victim(start_worker: Start) -> Iterator[Server]:
    """A further server, which a test may end."""
    server = start_worker().ready()
    yield server
    server.end()


@contextmanager
def routed(name: str, policy: str, workers: Sequence[Server], log: Path) -> Iterator[httpx.Client]:
    """A client of a router in front of servers.

    Arguments:
    - `name`: of the router.
    - `policy`: by which the router chooses a server.
    - `log`: the file of what the router prints.
    """
    port, metrics = _free_ports(2)
    command = [sys.executable, "-m", MODULES[name], "--policy", policy, "--api-key", KEY]
    command += ["--port", port, "--prometheus-port", metrics, "--health-check-interval-secs", "1"]
    command += ["--worker-urls", *(server.url for server in workers)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=120.0,
            trust_env=False,
        ) as client:
            until(lambda: _workers_of(client) == len(workers), 30.0)
            yield client
    finally:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[str]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(one.getsockname()[1]) for one in taken]
    for one in taken:
        one.close()
    return ports


def _workers_of(client: httpx.Client) -> int:
    """Servers that a router knows and finds healthy."""
    try:
        answer = client.get("/workers")
    except httpx.TransportError:
        return 0
    return sum(one["is_healthy"] for one in answer.json()["workers"])


def finished(server: Server) -> int:
    """Requests that a server has finished."""
    with server.client() as client:
        return client.get("/v1/stats").json()["finished"]


def text(body: str) -> str:
    """The text of a completion or of a chat, streamed or whole."""
    parts = [json.loads(body)] if body.startswith("{") else [data for _, data in events(body)]
    assert not any("ignored_fields" in part for part in parts)
    choices = [part["choices"][0] for part in parts]
    said = [choice.get("delta") or choice.get("message") or {"content": choice["text"]} for choice in choices]
    return "".join(one["content"] for one in said)


def ask(client: httpx.Client, prompt: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json=SHORT | {"prompt": prompt} | fields)


def ask_in_chat(client: httpx.Client, prompt: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": prompt}]
    return client.post("/v1/chat/completions", json=SHORT | {"messages": messages} | fields)


def check_sums(router: httpx.Client) -> None:
    """A router has answers for requests that come one after the other."""
    for prompt, result in 2 * list(SUMS.items()):
        assert text(ask(router, prompt).text) == result


class Asking(threading.Thread):
    """Sends `RUNNING` beside the test; `body` is the answer's, as far as it came."""

    def __init__(self, client: httpx.Client, **fields: Any):
        super().__init__(daemon=True)
        self._client, self._fields = client, RUNNING | fields
        self.body = ""
        self.cut = False
        self.start()

    def run(self) -> None:
        try:
            with self._client.stream("POST", "/v1/completions", json=self._fields) as answer:
                for part in answer.iter_text():
                    self.body += part
        except httpx.RemoteProtocolError:
            self.cut = True

    def done(self) -> "Asking":
        self.join(60.0)
        assert not self.is_alive()
        return self


class Load(NamedTuple):
    """Running requests of one router, of each kind one on each of two servers."""

    streams: list[Asking]
    wholes: list[Asking]


def load(routers: Sequence[httpx.Client], workers: Sequence[Server]) -> list[Load]:
    """Put a load through each router, all of whose streams have begun."""
    streams = [[Asking(router, stream=True) for _ in workers] for router in routers]
    until(lambda: all("data:" in one.body for each in streams for one in each), 60.0)
    wholes = [[Asking(router) for _ in workers] for router in routers]
    until(lambda: [_held(server) for server in workers] == [2 * len(routers)] * 2, 30.0)
    return [Load(*each) for each in zip(streams, wholes, strict=True)]


def _held(server: Server) -> int:
    """Requests that run or wait."""
    with server.client() as client:
        return len(client.get("/v1/requests").json()["data"])


@contextmanager
def all_routed(workers: Sequence[Server], directory: Path) -> Iterator[list[httpx.Client]]:
    """Clients of all routers, in front of the same servers."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(routed(name, "round_robin", workers, directory / name)) for name in MODULES
        ]


@pytest.fixture(scope="module")
def expected(workers: list[Server]) -> str:
    """What a server alone answers to `RUNNING`."""
    with workers[0].client() as client:
        return text(client.post("/v1/completions", json=RUNNING).text)


@pytest.mark.parametrize("name", MODULES)
def test_a_router_answers_as_a_server_alone(name: str, workers: list[Server], tmp_path: Path):
    asked = list(itertools.product((ask, ask_in_chat), SUMS, (False, True)))
    with workers[0].client() as alone:
        expected = [text(how(alone, prompt, stream=stream).text) for how, prompt, stream in asked]
    assert expected == [SUMS[prompt] for _, prompt, _ in asked]
    before = [finished(server) for server in workers]
    with routed(name, "round_robin", workers, tmp_path / "log") as router:
        assert [card["id"] for card in router.get("/v1/models").json()["data"]] == [MODEL]
        assert [text(how(router, prompt, stream=stream).text) for how, prompt, stream in asked] == expected
        error = ask(router, "1+1=", temperature=-1)
        assert (error.status_code, error.json()["error"]["param"]) == (400, "temperature")
    after = [finished(server) for server in workers]
    assert [b - a for a, b in zip(before, after, strict=True)] == [len(asked) / 2] * 2


@pytest.mark.parametrize("name", MODULES)
def test_prompts_that_begin_alike_go_to_one_server(name: str, workers: list[Server], tmp_path: Path):
    beginnings = ["A long beginning of one client. " * 6, "What another client begins with. " * 6]
    with routed(name, "cache_aware", workers, tmp_path / "log") as router:
        before, counts = [finished(server) for server in workers], []
        first = Asking(router, prompt=beginnings[0])
        until(lambda: sum(map(_held, workers)) == 1, 30.0)
        here = [_held(server) for server in workers]
        for beginning in reversed(beginnings):  # the other one goes to the idle server first
            for end in ("1", "22", "333"):
                text(ask(router, beginning + end, max_tokens=1).text)
            first.done()
            now = [finished(server) for server in workers]
            counts.append([count - b for count, b in zip(now, before, strict=True)])
    assert counts == [[1 if one else 3 for one in here], [4 if one else 3 for one in here]]


def test_a_server_that_is_killed(victim: Server, workers: list[Server], expected: str, tmp_path: Path):
    pair = [workers[0], victim]
    with all_routed(pair, tmp_path) as routers:
        loads = load(routers, pair)
        victim.process.kill()
        for router, (streams, wholes) in zip(routers, loads, strict=True):
            # Who has seen nothing of an answer gets the answer of the other server.
            assert [text(one.done().body) for one in wholes] == [expected] * 2
            whole, cut = sorted((one.done() for one in streams), key=lambda one: one.cut)
            assert (text(whole.body), whole.cut, cut.cut) == (expected, False, True)
            check_sums(router)


def test_a_server_that_drains(victim: Server, workers: list[Server], expected: str, tmp_path: Path):
    pair = [workers[0], victim]
    with all_routed(pair, tmp_path) as routers:
        loads = load(routers, pair)
        victim.process.send_signal(signal.SIGTERM)
        for router in routers:
            check_sums(router)
        assert victim.alive
        for one in itertools.chain.from_iterable(itertools.chain.from_iterable(loads)):
            assert (text(one.done().body), one.cut) == (expected, False)
        assert victim.process.wait(30.0) == 0
