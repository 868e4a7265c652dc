"""Pages of other origins, in Chromium: who is admitted can do what OpenAI's package does in a browser."""

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser  # pyright: ignore[reportMissingImports]

from tests.api.sse import events
from tests.clients.conftest import API_KEY
from tests.clients.servers import LONG, Server, Starter, until

pytestmark = pytest.mark.clients

SENT = {
    "Accept": "application/json",
    "Authorization": f"Bearer {API_KEY}",
    "Content-Type": "application/json",
    "OpenAI-Organization": "org",
    "OpenAI-Project": "project",
    "X-Stainless-Arch": "unknown",
    "X-Stainless-Lang": "js",
    "X-Stainless-OS": "Unknown",
    "X-Stainless-Package-Version": "5.0.0",
    "X-Stainless-Retry-Count": "0",
    "X-Stainless-Runtime": "browser:chrome",
    "X-Stainless-Runtime-Version": "130.0.0",
    "X-Stainless-Timeout": "600",
}
"""Headers of OpenAI's package for JavaScript in a browser."""

ASK = """async ([url, headers, bodies]) => {
    const post = (body, more) =>
        fetch(url, { method: "POST", headers, body: JSON.stringify(body), ...more });
    try {
        const [body, held] = bodies, leaving = new AbortController();
        const holding = held && await post(held, { signal: leaving.signal });
        const answer = await post(body);
        const told = ["x-request-id", "retry-after"].map((name) => answer.headers.get(name));
        const text = await answer.text();
        leaving.abort();
        return { status: answer.status, told, text };
    } catch (error) {
        return { failed: error.name };
    }
}"""
"""Asks for the first body, while the answer to the second one, if any, arrives."""


class Served(NamedTuple):
    """A server, and origins of pages: one that is admitted, and one that is not."""

    server: Server
    admitted: str
    stranger: str


@pytest.fixture(scope="module")
def served(start_server: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    site = tmp_path_factory.mktemp("site")
    (site / "index.html").write_text("<!doctype html><title>Another origin</title>")
    handler = partial(_Quiet, directory=site)
    sites = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    for one in sites:
        threading.Thread(target=one.serve_forever, daemon=True).start()
    admitted, stranger = (f"http://127.0.0.1:{one.server_port}" for one in sites)
    options = "--no-warmup", "--log-requests", "--cors-origin", admitted, "--max-requests-per-key", "1"
    yield Served(start_server(*options, api_key=API_KEY).ready(), admitted, stranger)
    for one in sites:
        one.shutdown()
        one.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, directory: Path):
        super().__init__(*args, directory=str(directory))

    def log_message(self, format: str, *args: Any) -> None:
        pass


def ask(browser: Browser, served: Served, origin: str, *bodies: dict[str, Any]) -> dict[str, Any]:
    """What a page of `origin` learns of the answer to the first of `bodies`; see `ASK`."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(origin)
        return page.evaluate(ASK, [f"{served.server.url}/v1/completions", SENT, bodies])


@pytest.mark.parametrize("stream", [False, True])
def test_an_admitted_page_is_answered(browser: Browser, served: Served, stream: bool):
    body = {"prompt": "1+1=", "max_tokens": 4, "stream": stream}
    answer = ask(browser, served, served.admitted, body)

    assert answer["status"] == 200, answer
    assert answer["told"][0]  # the request's id
    if stream:
        assert "".join(data["choices"][0]["text"] for _, data in events(answer["text"])) == "2"
    else:
        assert '"text":"2"' in answer["text"]


def test_an_admitted_page_learns_when_to_ask_again(browser: Browser, served: Served):
    held = {"prompt": "1+1=", "stream": True, **LONG}
    answer = ask(browser, served, served.admitted, {"prompt": "1+1="}, held)

    assert answer["status"] == 429, answer
    assert int(answer["told"][1]) >= 1
    with served.server.client() as client:
        until(lambda: not client.get("/v1/requests").json()["data"], 30.0)


def test_an_admitted_page_learns_why_it_is_refused(browser: Browser, served: Served):
    answer = ask(browser, served, served.admitted, {"prompt": 1})

    assert answer["status"] == 400, answer
    assert "prompt" in answer["text"]


def test_a_strange_page_learns_nothing_and_asks_nothing(browser: Browser, served: Served):
    def posted() -> int:
        return served.server.log.read_text().count("POST /v1/completions")

    body = {"prompt": "1+1=", "max_tokens": 4}
    ask(browser, served, served.admitted, body)
    before = posted()
    assert before
    assert ask(browser, served, served.stranger, body) == {"failed": "TypeError"}
    assert posted() == before
