"""curl against a real server."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.servers import LONG, Server, until

pytestmark = pytest.mark.clients

BODY = {"prompt": "123+456=", "max_tokens": 8, "temperature": 0}
FAILED, TIMED_OUT = 22, 28
"""Exit codes of curl."""

FINISHED = 'jdllm_http_requests_total{endpoint="/v1/completions",status="200"}'


def command(server: Server, path: str, *options: str) -> list[str]:
    key = ["--header", f"Authorization: Bearer {server.api_key}"]
    return ["curl", "--silent", "--noproxy", "*", *key, *options, f"{server.url}{path}"]


def curl(server: Server, path: str, *options: str, code: int = 0) -> str:
    done = subprocess.run(command(server, path, *options), capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout


def sending(body: object) -> tuple[str, ...]:
    return "--header", "Content-Type: application/json", "--data", json.dumps(body)


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_an_answer(server: Server, version: str):
    answer = json.loads(curl(server, "/v1/completions", version, *sending(BODY)))
    assert answer["choices"][0]["text"] == "579"


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_a_stream(server: Server, version: str):
    lines = curl(server, "/v1/completions", "--no-buffer", version, *sending(BODY | {"stream": True}))
    *datas, done, end = (block for block in lines.split("\n\n") if not block.startswith(":"))
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(data.removeprefix("data: ")) for data in datas]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "579"


def test_a_stream_comes_as_it_is_made(server: Server):
    body = LONG | {"prompt": "1+1=", "n": 16, "stream": True, "stream_mode": "denoise"}
    running = subprocess.Popen(
        command(server, "/v1/completions", "--no-buffer", *sending(body)), stdout=subprocess.PIPE
    )
    with running, server.client() as client:
        assert running.stdout is not None
        assert running.stdout.readline() == b"event: start\n"
        while running.stdout.readline() != b"event: step\n":
            assert running.poll() is None
        assert client.get("/v1/requests").json()["data"]
        running.terminate()
    server.settle()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", BODY | {"n": 0}, 400),
        ("/v1/completions", BODY | {"model": "other"}, 404),
        ("/v1/nowhere", BODY, 404),
        ("/version", BODY, 405),
        ("/tokenize", {"prompt": "a" * (33 << 20)}, 413),
    ],
)
def test_error_codes(server: Server, tmp_path: Path, path: str, body: dict, status: int):
    (tmp_path / "body.json").write_text(json.dumps(body))
    options = ("--header", "Content-Type: application/json", "--data", f"@{tmp_path}/body.json")
    found = curl(server, path, *options, "--write-out", "\n%{http_code}").splitlines()
    assert found[-1] == str(status)
    assert json.loads(found[0])["error"]["message"]
    curl(server, path, "--fail", *options, code=FAILED)


def test_a_large_body(server: Server, tmp_path: Path):
    text = "a" * (1 << 18)  # curl waits for the server's word before it sends so much
    (tmp_path / "body.json").write_text(json.dumps({"tokens": list(text.encode())}))
    options = ("--header", "Content-Type: application/json", "--header", "Expect: 100-continue")
    found = curl(server, "/detokenize", *options, "--data", f"@{tmp_path}/body.json")
    assert json.loads(found)["prompt"] == text


def test_whoever_waits_no_longer_is_forgotten(server: Server):
    body = LONG | {"prompt": "1+1=", "n": 32}
    curl(server, "/v1/completions", "--max-time", "1", *sending(body), code=TIMED_OUT)
    server.settle(10.0)


def test_what_needs_no_key(server: Server):
    for path in ("/health", "/version", "/metrics", "/", "/stats"):
        without = ["curl", "--silent", "--noproxy", "*", "--fail", f"{server.url}{path}"]
        assert subprocess.run(without, capture_output=True, check=True).stdout
    without = ["curl", "--silent", "--noproxy", "*", "--write-out", "%{http_code}", f"{server.url}/v1/stats"]
    assert subprocess.run(without, capture_output=True, check=True).stdout.endswith(b"401")


def test_metrics_count(server: Server):
    def finished() -> float:
        lines = curl(server, "/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(FINISHED))

    before = finished()
    curl(server, "/v1/completions", *sending(BODY))
    until(lambda: finished() == before + 1, 10.0)
