"""What tests do with the page, and what they compare it with."""

from collections.abc import Mapping
from typing import Any

from playwright.sync_api import Page, expect  # pyright: ignore[reportMissingImports]

from tests.api.sse import events
from tests.clients.servers import Server

PROMPT = "Tom has 4 red cups. Ann has 7 blue hats. What color are the hats?"
MASK = "░"
END = "∎"

DONE = 60_000
"""Milliseconds that a run may take on a busy machine."""


def go(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator("#run")).to_be_enabled()


def run(page: Page) -> None:
    page.keyboard.press("Control+Enter")
    finish(page)


def finish(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("Finished", timeout=DONE)


def choose(page: Page, **settings: object) -> None:
    for name, value in settings.items():
        field = page.locator(f"#setting-{name}")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))


def cells(page: Page) -> list[tuple[str, str]]:
    """The state and the text of every position that is drawn."""
    found = page.locator("#tokens > .token").evaluate_all(
        "cells => cells.map(cell => [cell.classList[1], cell.textContent])"
    )
    return [tuple(pair) for pair in found]


def denoised(server: Server, path: str, body: Mapping[str, Any]) -> list[tuple[str | None, Any]]:
    """The events of a run."""
    with server.client() as client:
        answer = client.post(path, json={**body, "stream": True, "stream_mode": "denoise"})
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def frames(told: list[tuple[str | None, Any]], ends: set[str]) -> list[list[tuple[str, str]]]:
    """What every position holds before the first step and after each, by the events of a run."""
    start = told[0][1]
    now = [
        ("mask", MASK) if text is None else ("given", text)
        for text in start["texts"][start["start"] : start["stop"]]
    ]
    found = [list(now)]
    for name, step in told:
        if name == "step":
            for position, text, committed in zip(
                step["positions"], step["texts"], step["committed"], strict=True
            ):
                state = "committed" if committed else "provisional"
                now[position - start["start"]] = state, END if text in ends else text
            found.append(list(now))
    return found
