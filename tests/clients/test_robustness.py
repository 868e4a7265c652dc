"""Clients that are broken, slow, gone or hostile."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from tests.clients.servers import LONG, ROWS, Server, until
from tests.clients.wire import Answer, check_refusal, connect, head, post, read, reset

pytestmark = pytest.mark.clients

POSTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/infill",
    "/v1/score",
    "/tokenize",
    "/detokenize",
)
SLOT = {"type": "text", "max_tokens": 400}
DEEP = 100_000
MALFORMED = {
    "nothing": b"",
    "half an object": b"{",
    "a list": b"[]",
    "null": b"null",
    "a string": b'"prompt"',
    "two objects": b"{}{}",
    "no number": b'{"prompt":NaN,"tokens":[NaN],"temperature":NaN}',
    "infinity": b'{"prompt":1e999,"answers":["a"],"temperature":1e999,"cfg_scale":1e999}',
    "many digits": b'{"max_tokens":' + b"9" * 5000 + b"}",
    "invalid UTF-8": b'{"prompt":"\xff\xfe\xc3"}',
    "half a pair": b'{"prompt":"\\ud800","text":"\\ud800","messages":[{"role":"user","content":"\\ud800"}]}',
    "nested lists": b'{"prompt":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "nested objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "open lists": b"[" * DEEP,
    "a null byte": b'{"prompt":"a"\x00}',
    "a large half": b'{"prompt":"' + b"a" * (4 << 20),
    "a large wrong one": b'{"prompt":1,"text":1,"a":"' + b"a" * (4 << 20) + b'"}',
}

WRONG = {
    "no prompt": {},
    "no prompts": {"prompt": []},
    "ids and texts": {"prompt": [1, "a"]},
    "ids that do not exist": {"prompt": [5000]},
    "negative ids": {"prompt": [-1]},
    "huge ids": {"prompt": [2**70]},
    "a number": {"prompt": 1},
    "a number as text": {"prompt": "a", "max_tokens": "8"},
    "a number as a switch": {"prompt": "a", "stream": 1},
    "a switch as a number": {"prompt": "a", "temperature": True},
    "a fraction": {"prompt": "a", "max_tokens": 1.5},
    "a huge seed": {"prompt": "a", "seed": 2**64},
    "many samples": {"prompt": "a", "n": 10**9},
    "many tokens": {"prompt": "a", "max_tokens": 2**24},
    "a long prompt": {"prompt": "a" * ROWS},
    "a longer prompt": {"prompt": "a" * (16 << 20)},
    "long ids": {"prompt": [1] * 10**6},
    "many stops": {"prompt": "a", "stop": ["a"] * 1000},
    "an unknown rule": {"prompt": "a", "transfer": "other"},
    "a rule without its cache": {"prompt": "a", "retention": 0.5},
    "another model": {"prompt": "a", "model": "../../etc/passwd"},
    "objects": {"prompt": {"a": {"b": []}}},
}


def ask(client: httpx.Client, path: str, content: bytes) -> httpx.Response:
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_malformed_bodies_are_refused(client: httpx.Client, path: str, body: bytes):
    answer = ask(client, path, body)
    check_refusal(answer.status_code, answer.content)


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused(client: httpx.Client, fields: dict):
    answer = client.post("/v1/completions", json={"max_tokens": 1} | fields)
    check_refusal(answer.status_code, answer.content)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_bodies_of_other_types_are_refused(client: httpx.Client, kind: str):
    answer = client.post("/v1/completions", content=b"prompt=a", headers={"Content-Type": kind})
    check_refusal(answer.status_code, answer.content)


def test_what_would_be_too_much_is_refused_before_it_is_made(server: Server, client: httpx.Client):
    before, began = server.resident, time.monotonic()
    answer = client.post("/v1/completions", json={"prompt": ["a"] * 2048, "n": 1024, "max_tokens": 1})
    assert check_refusal(answer.status_code, answer.content)["param"] == "n"
    slots = [{"type": "text", "max_tokens": 1 << 20}] * 2048
    answer = client.post("/v1/infill", json={"parts": slots})
    assert check_refusal(answer.status_code, answer.content)["code"] == "context_length_exceeded"
    assert server.resident - before < 64 << 20
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/%ff%00..%2f", 404),
        ("DELETE", "/v1/requests/%ff", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("TRACE", "/health", 405),
        ("GET", "/page/..%2f..%2fapp.py", 404),
    ],
)
def test_what_is_not_there_is_refused(client: httpx.Client, method: str, path: str, status: int):
    answer = client.request(method, path)
    check_refusal(answer.status_code, answer.content)
    assert answer.status_code == status


def test_special_tokens_in_texts_are_text(client: httpx.Client):
    text = "<|mdm_mask|><|endoftext|><|start_header_id|>1+1="
    answer = client.post("/v1/completions", json={"prompt": text, "max_tokens": 1, "echo": True}).json()
    assert answer["choices"][0]["text"].startswith(text)
    assert answer["usage"]["prompt_tokens"] == len(text)

    def tokens(content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]

    assert tokens(text) - tokens("1") == len(text) - 1


def test_a_body_that_says_it_is_huge_is_refused_before_it_comes(server: Server):
    with connect(server) as connection:
        connection.sendall(head(server, 1 << 40))
        status, fields, body = read(connection)
    assert status == 413
    assert check_refusal(status, body)["code"] == "body_too_large"
    assert "connection: close" in fields.lower()


def test_a_body_that_grows_too_large_is_refused(server: Server):
    with connect(server) as connection:
        connection.sendall(head(server, "chunked"))
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        sent = 0
        try:
            while sent < 1 << 10:
                connection.sendall(chunk)
                sent += 1
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 100


@pytest.mark.parametrize("rest", [b"", b"zz\r\n"], ids=["nothing more", "a bad chunk"])
def test_who_has_no_key_need_not_send_a_body(server: Server, rest: bytes):
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + rest
        )
        status, _, body = read(connection)
    assert check_refusal(status, body)["code"] in ("invalid_api_key", "invalid_http")


NOT_HTTP = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a bad header": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nno header\r\n\r\n",
    "a bad length": b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: many\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a bad chunk": b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "bytes in a path": b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * (1 << 20),
    "a long path": b"GET /" + b"a" * (1 << 20),
    "a header flood": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: a\r\n" * (1 << 18) + b"\r\n",
}


@pytest.mark.parametrize("data", NOT_HTTP.values(), ids=NOT_HTTP)
def test_what_is_no_http_is_refused(server: Server, data: bytes):
    with connect(server) as connection:
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return  # it has heard enough
        answer = read(connection)
    if answer.status:
        check_refusal(answer.status, answer.body)


def test_many_connections_at_a_time(server: Server, client: httpx.Client):
    connections = [connect(server) for _ in range(400)]
    try:
        began = time.monotonic()
        answer = client.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 4}).json()
        assert answer["choices"][0]["text"] == "2"
        assert time.monotonic() - began < 30
    finally:
        for connection in connections:
            connection.close()


class Silent(NamedTuple):
    """Connections that keep the server waiting, and what came of each: its answer and the seconds it took."""

    answers: dict[str, tuple[Answer, float]]
    threads: list[threading.Thread]

    def outcome(self, name: str) -> tuple[Answer, float]:
        for thread in self.threads:
            thread.join()
        return self.answers[name]


def _trickle(connection: socket.socket, data: bytes, seconds: float) -> None:
    """Send a byte at a time for so long."""
    end = time.monotonic() + seconds
    try:
        for byte in data:
            if time.monotonic() > end:
                return
            connection.sendall(bytes([byte]))
            time.sleep(1.0)
    except (BrokenPipeError, ConnectionResetError):
        return


def _first_answer(server: Server, connection: socket.socket) -> None:
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    while not connection.recv(1 << 16).endswith(b"}"):
        pass


def _say_nothing(server: Server, connection: socket.socket) -> None:
    pass


def _say_headers_slowly(server: Server, connection: socket.socket) -> None:
    _trickle(connection, b"GET /version HTTP/1.1\r\nX: " + b"a" * 100, 70)


def _stop_in_a_second_head(server: Server, connection: socket.socket) -> None:
    _first_answer(server, connection)
    connection.sendall(b"GET /version HTTP/1.1\r\n")


def _say_a_second_head_slowly(server: Server, connection: socket.socket) -> None:
    _first_answer(server, connection)
    _trickle(connection, b"GET /version HTTP/1.1\r\nX: " + b"a" * 100, 70)


def _stop_in_a_body(server: Server, connection: socket.socket) -> None:
    connection.sendall(head(server, 100) + b'{"prompt"')


def _say_a_body_slowly(server: Server, connection: socket.socket) -> None:
    connection.sendall(head(server, 1000))
    _trickle(connection, b" " * 1000, 70)


SILENT = {
    "nothing": _say_nothing,
    "slow headers": _say_headers_slowly,
    "half a second head": _stop_in_a_second_head,
    "a slow second head": _say_a_second_head_slowly,
    "half a body": _stop_in_a_body,
    "a slow body": _say_a_body_slowly,
}


@pytest.fixture(scope="module", autouse=True)
def silent(server: Server) -> Silent:
    """They are silent for a minute, while other tests run."""
    answers = {}

    def wait(name: str) -> None:
        began = time.monotonic()
        with connect(server, 100.0) as connection:
            SILENT[name](server, connection)
            answers[name] = (read(connection), time.monotonic() - began)

    threads = [threading.Thread(target=wait, args=(name,), daemon=True) for name in SILENT]
    for thread in threads:
        thread.start()
    return Silent(answers, threads)


def test_a_slow_reader_holds_nobody_up(server: Server, client: httpx.Client):
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": "1+1=", "stream": True, "stream_mode": "denoise", **LONG, "steps": 90}
        connection.sendall(post(server, body))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        answer = client.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 4}).json()
        assert answer["choices"][0]["text"] == "2"
        server.settle(120.0)


def _left(server: Server, connection: socket.socket, leave: str) -> None:
    with server.client() as probe:
        until(lambda: bool(probe.get("/v1/requests").json()["data"]), 30.0)
    if leave == "reset":
        reset(connection)
    else:
        connection.close()
    server.settle(10.0)


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_forgotten_at_once(server: Server, leave: str, cache: str, stream: bool):
    connection = connect(server)
    body = {"prompt": "1+1=", "n": 32, "stream": stream, **LONG, "block_length": 16, "cache": cache}
    connection.sendall(post(server, body))
    if stream:
        assert connection.recv(16).startswith(b"HTTP/1.1 200")
    _left(server, connection, leave)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/infill"])
def test_who_leaves_another_route_is_forgotten_too(server: Server, path: str):
    fields = {"messages": [{"role": "user", "content": "1"}]} if "chat" in path else {"parts": ["1+1=", SLOT]}
    sampling = LONG if "chat" in path else {"block_length": 16}
    data = json.dumps({**fields, "n": 32, **sampling}).encode()
    connection = connect(server)
    connection.sendall(head(server, len(data), path) + data)
    _left(server, connection, "close")


def test_memory_stays_flat(server: Server, client: httpx.Client):
    def round() -> None:
        for path in POSTS:
            for body in MALFORMED.values():
                ask(client, path, body)
        for fields in WRONG.values():
            client.post("/v1/completions", json={"max_tokens": 1, **fields})
        for data in NOT_HTTP.values():
            with connect(server) as connection:
                try:
                    connection.sendall(data)
                except (BrokenPipeError, ConnectionResetError):
                    continue

    for _ in range(2):
        round()
    before = server.resident
    for _ in range(4):
        round()
    assert server.resident - before < 48 << 20


@pytest.mark.parametrize("name", ["nothing", "slow headers", "half a second head", "a slow second head"])
def test_heads_that_do_not_come_are_given_up(silent: Silent, name: str):
    answer, seconds = silent.outcome(name)
    assert seconds < 65
    if answer.status:
        check_refusal(answer.status, answer.body)


@pytest.mark.parametrize("name", ["half a body", "a slow body"])
def test_bodies_that_do_not_come_are_refused(silent: Silent, name: str):
    answer, seconds = silent.outcome(name)
    assert answer.status == 408
    assert check_refusal(answer.status, answer.body)["code"] == "slow_body"
    assert 50 < seconds < 90


def test_nothing_went_wrong_inside(server: Server, client: httpx.Client):
    assert client.get("/health").json() == {"status": "ok"}
    assert "Traceback" not in server.log.read_text()
    server.settle()
