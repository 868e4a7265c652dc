"""Floods of large bodies: others are answered meanwhile, and the memory comes back."""

import json
import threading
import time

import pytest

from tests.clients.servers import Server, Starter, until

pytestmark = pytest.mark.clients

PART = {"type": "image_url", "image_url": "x" * 12}
LARGE = {
    "wrong parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART] * 95}] * 2048},
    ),
    "options": (
        "/v1/infill",
        {"parts": ["a", *[{"type": "choice", "options": ["abcdefghijkl" * 4] * 256}] * 2000]},
    ),
    "ids": ("/v1/completions", {"prompt": [5000] * 500_000}),
    "a text": ("/v1/completions", {"prompt": "a" * (16 << 20)}),
}


def flood(server: Server, name: str) -> list[float]:
    """Seconds that the server's health took while eight large bodies arrived."""
    path, body = LARGE[name]
    content = json.dumps(body).encode()

    def post() -> None:
        with server.client() as own:
            assert own.post(path, content=content).status_code == 400

    posting = [threading.Thread(target=post) for _ in range(8)]
    taken = []
    for thread in posting:
        thread.start()
    with server.client() as client:
        while any(thread.is_alive() for thread in posting):
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            taken.append(time.monotonic() - began)
            time.sleep(0.01)
    return sorted(taken)


@pytest.mark.parametrize("name", ["wrong parts", "options"])
def test_large_bodies_hold_nobody_up(server: Server, name: str):
    flood(server, name)
    taken = flood(server, name)
    assert taken[len(taken) * 9 // 10] < 0.1  # the machine and this process are busy too
    assert taken[-1] < 0.5


def test_memory_of_large_bodies_is_given_back(start_server: Starter):
    server = start_server("--no-warmup").ready()
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 4}).status_code == 200
    before = server.resident
    for name in LARGE:
        flood(server, name)
    until(lambda: server.resident < before * 1.1, 10.0)
    server.end()
