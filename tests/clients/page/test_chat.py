"""The conversation on the page: keys, stopping, answers made anew, messages taken back, empty answers."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect  # pyright: ignore[reportMissingImports]

from tests.clients.page.drive import DONE, choose, finish
from tests.clients.servers import Server

pytestmark = pytest.mark.clients

SUM = "12+34="
SLOW = {"gen_length": 240, "steps": 240}


@pytest.fixture
def asked(page: Page) -> list[list[dict[str, Any]]]:
    """The messages of every request that the page makes from here on."""
    found: list[list[dict[str, Any]]] = []

    def note(route: Route) -> None:
        found.append(json.loads(route.request.post_data or "")["messages"])
        route.continue_()

    page.route("**/v1/chat/completions", note)
    page.click("#tab-chat")
    return found


def say(page: Page, text: str) -> None:
    page.fill("#message", text)
    page.keyboard.press("Enter")


def said(page: Page) -> list[str]:
    return page.locator("#turns .said").all_inner_texts()


def test_shift_enter_begins_a_line(page: Page, asked: list):
    page.fill("#message", "1+1")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("=")
    expect(page.locator("#message")).to_have_value("1+1\n=")
    assert asked == []


def test_an_answer_is_made_anew(page: Page, asked: list):
    say(page, SUM)
    finish(page)
    before = said(page)
    page.click("text=Regenerate")
    expect(page.locator("#status")).to_contain_text("It is the same again", timeout=DONE)
    assert said(page) == before
    assert asked == [[{"role": "user", "content": SUM}]] * 2


def test_a_message_is_taken_back_with_all_that_followed(page: Page, asked: list):
    for text in (SUM, "1+1="):
        say(page, text)
        finish(page)
        page.evaluate("document.getElementById('status').textContent = ''")
    page.locator("#turns button", has_text="Edit").first.click()
    expect(page.locator("#message")).to_have_value(SUM)
    expect(page.locator("#message")).to_be_focused()
    assert said(page) == []


def test_what_is_stopped_goes_back_into_the_box(page: Page, asked: list, server: Server):
    choose(page, **SLOW)
    say(page, SUM)
    page.wait_for_function("() => document.querySelectorAll('#tokens .committed').length > 2", timeout=DONE)
    page.fill("#message", "and more")
    page.click("#cancel")
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#message")).to_have_value(f"{SUM}\nand more")
    assert said(page) == []
    server.settle()


def test_an_empty_answer_says_so(page: Page):
    end = {"index": 0, "text": "", "token_ids": [257], "finish_reason": "stop", "nfe": 1, "committed_in": [0]}
    end["usage"] = {"completion_tokens": 1}
    body = f"event: end\ndata: {json.dumps(end)}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    page.click("#tab-chat")
    say(page, SUM)
    finish(page)
    expect(page.locator("#turns .said").last).to_contain_text("The answer is empty")
    expect(page.locator("#empty")).to_be_visible()
