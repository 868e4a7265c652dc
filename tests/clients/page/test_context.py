"""A long context on the page: what is asked, and the passages that were kept."""

import json

import pytest
from playwright.sync_api import Page, Request, expect  # pyright: ignore[reportMissingImports]

from tests.clients.page.drive import go, run
from tests.clients.servers import Server

pytestmark = pytest.mark.clients

CONTEXT = "".join(f"a{letter}={index:03d};" for index, letter in enumerate("bcdefghijklmnopqrst"))
CUT = {"preset": "ultrallada", "chunk_length": 32, "chunks_kept": 2}


def ask(page: Page) -> None:
    page.fill("#prompt", "get ac=")
    page.click("#context-part summary")
    page.fill("#context", CONTEXT)
    page.locator("#prefilling").select_option("ultrallada")
    page.fill("#chunk-length", "32")
    page.fill("#chunks-kept", "2")
    page.fill("#setting-gen_length", "16")
    page.fill("#setting-seed", "0")


def test_kept_passages_are_marked_in_the_text(page: Page, server: Server):
    asked: list[dict] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            asked.append(json.loads(request.post_data or ""))

    page.on("request", note)
    ask(page)
    run(page)

    (body,) = asked
    assert (body["context"], body["prefilling"]) == (CONTEXT, CUT)
    with server.client() as client:
        answer = client.post("/v1/completions", json=body | {"stream": False, "stream_mode": None}).json()
    (choice,) = answer["choices"]
    told = choice["prefilling"]
    expect(page.locator("#text")).to_have_text(choice["text"])
    expect(page.locator("#passages")).to_have_text(CONTEXT)
    expect(page.locator("#passages mark")).to_have_text([CONTEXT[a:b] for a, b in told["passages"]])
    expect(page.locator("#passages-note")).to_have_text(f"2 of {len(told['scores'])} chunks were kept.")


def test_a_link_keeps_the_context(page: Page, server: Server):
    ask(page)
    run(page)
    text, marked = (page.locator(at).all_inner_texts() for at in ("#text", "#passages mark"))
    address = page.url

    go(page, server.url)
    go(page, address)
    expect(page.locator("#context")).to_have_value(CONTEXT)
    run(page)
    expect(page.locator("#text")).to_have_text(text)
    expect(page.locator("#passages mark")).to_have_text(marked)


def test_without_a_context_there_are_no_passages(page: Page):
    page.fill("#prompt", "12+34=")
    page.fill("#setting-gen_length", "16")
    run(page)
    expect(page.locator("#passages-part")).to_be_hidden()
