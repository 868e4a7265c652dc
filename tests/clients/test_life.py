"""A server's beginning and its ends."""

import json
import re
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.sse import events
from tests.clients.servers import LONG, Server, Starter, until

pytestmark = pytest.mark.clients

PROMPT, SUM = "123+456=", "579"
DYING = Path(__file__).with_name("dying_server.py")


class Asking(threading.Thread):
    """Asks a server beside the test; `result` is the answer's text, or what went wrong."""

    def __init__(self, server: Server, **body: Any):
        super().__init__(daemon=True)
        self._server, self._body = server, {"prompt": PROMPT, **body}
        self.status, self.result = 0, ""
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with (
                self._server.client() as client,
                client.stream("POST", "/v1/completions", json=self._body) as answer,
            ):
                self.status = answer.status_code
                for text in answer.iter_text():
                    self.result += text
        except httpx.TransportError as error:
            self.error = error

    def done(self, seconds: float = 120.0) -> "Asking":
        self.join(seconds)
        assert not self.is_alive()
        return self


def busy(server: Server, requests: int) -> Callable[[], bool]:
    """Whether so many requests are in the engine."""

    def condition() -> bool:
        with server.client() as client:
            return len(client.get("/v1/requests").json()["data"]) == requests

    return condition


def compiled(server: Server) -> int:
    """Executables that it had to compile before it answered."""
    found = re.search(r"compiled (\d+) executables and found (\d+)", server.log.read_text())
    assert found is not None
    assert int(found[2]) > 0
    return int(found[1])


def check_sum(server: Server) -> None:
    with server.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == SUM


def test_a_signal_lets_what_runs_finish(start_server: Starter):
    server = start_server().ready()
    whole = Asking(server, **LONG | {"steps": 90})
    stream = Asking(server, **LONG | {"steps": 90}, stream=True)
    until(busy(server, 2), 30.0)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(200.0) == 0
    choice = json.loads(whole.done().result)["choices"][0]
    assert choice["nfe"] == 90
    chunks = [data["choices"][0] for _, data in events(stream.done().result)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]


def test_a_second_signal_ends_what_runs(start_server: Starter):
    server = start_server().ready()
    running = [Asking(server, n=16, stream=stream, **LONG) for stream in (False, True)]
    until(busy(server, 32), 30.0)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(2.0)
    assert server.alive
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30.0) == 0
    whole, stream = (asking.done() for asking in running)
    assert (whole.status, whole.error, stream.error) == (503, None, None)
    assert json.loads(whole.result)["error"]["code"] == "server_stopping"
    assert events(stream.result)[-1][1]["error"]["code"] == "server_stopping"
    assert "Traceback" not in server.log.read_text()


def test_a_killed_server_is_soon_back(start_server: Starter):
    server = start_server().ready()
    check_sum(server)
    running = [Asking(server, n=4, stream=bool(i % 2), **LONG) for i in range(12)]
    until(busy(server, 48), 30.0)
    server.process.kill()
    began = time.monotonic()
    for asking in running:
        assert asking.done(10.0).error is not None
    assert time.monotonic() - began < 10.0
    again = start_server().ready()
    assert compiled(again) == 0
    check_sum(again)
    again.end()


def test_an_engine_that_dies_takes_the_server_along(start_server: Starter):
    environment = {"DYING_PARTS": "4", "DYING_SECONDS": "5"}
    server = start_server(program=(str(DYING),), environment=environment).ready()
    with server.client() as client:
        whole = Asking(server, **LONG)
        stream = Asking(server, stream=True, **LONG)
        until(lambda: client.get("/health").status_code == 503, 120.0)
        health = client.get("/health").json()["error"]
        assert (health["code"], health["type"]) == ("engine_dead", "server_error")
        refused = client.post("/v1/completions", json={"prompt": PROMPT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        # They are told before the process ends.
        assert whole.done(4.0).status == 503
        assert json.loads(whole.result)["error"]["code"] == "engine_dead"
        assert events(stream.done(4.0).result)[-1][1]["error"]["code"] == "engine_dead"
    assert server.process.wait(60.0) == 1


def test_a_port_that_is_taken_is_said_at_once(server: Server, start_server: Starter):
    port = server.url.rpartition(":")[2]
    second = start_server("--port", port)
    assert second.process.wait(60.0) == 2
    (line,) = second.log.read_text().splitlines()
    assert line.startswith(f"error: cannot listen on 127.0.0.1 port {port}")


def test_logs_hold_no_keys_and_no_prompts(server: Server):
    secret, prompt = "a-wrong-key-0451", "a-prompt-that-nobody-logs"
    with server.client() as client:
        for fields in ({}, {"n": 0}, {"stream": True}, {"max_tokens": 10**5}, {"cache": prompt}):
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **fields})
        client.post("/v1/completions", content=f'{{"prompt": "{prompt}', headers={"Content-Type": "a/b"})
        client.post("/v1/score", json={"prompt": prompt, "answers": [prompt], "mc_num": 1})
        refused = client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"})
        assert refused.status_code == 401
    log = server.log.read_text()
    assert server.api_key is not None
    for text in (server.api_key, secret, prompt):
        assert text not in log


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    made = directory / "certificate.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(made[0]), "-keyout", str(made[1])]
    subprocess.run(command, check=True, capture_output=True)
    return made


def test_tls(start_server: Starter, certificate: tuple[Path, Path]):
    cert, key = map(str, certificate)
    server = start_server("--ssl-certfile", cert, "--ssl-keyfile", key, api_key="a-key").ready()
    assert server.url.startswith("https://")
    with server.client(verify=ssl.create_default_context(cafile=cert)) as client:
        stream = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "stream": True})
        texts = [data["choices"][0]["text"] for _, data in events(stream.text)]
        assert "".join(texts) == SUM
    with server.client(verify=True) as stranger, pytest.raises(httpx.ConnectError, match="certificate"):
        stranger.get("/health")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60.0) == 0
