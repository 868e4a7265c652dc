"""Runs on the page: what is drawn of their steps, against the events and answers of the API."""

import pytest
from playwright.sync_api import BrowserContext, Page, expect  # pyright: ignore[reportMissingImports]

from tests.clients.page.drive import (
    DONE,
    MASK,
    PROMPT,
    cells,
    choose,
    denoised,
    finish,
    frames,
    go,
    run,
)
from tests.clients.servers import Server

pytestmark = pytest.mark.clients

SLOW = {"gen_length": 240, "steps": 240}


@pytest.fixture
def ends(server: Server) -> set[str]:
    """Texts of the tokens that end an answer."""
    with server.client() as client:
        known = client.get("/tokenizer_info").json()
    return {known["eos_token"], known["eot_token"]}


def test_a_run_ends_with_the_answer_of_the_api(page: Page, server: Server):
    page.fill("#prompt", PROMPT)

    run(page)

    with server.client() as client:
        choice = client.post("/v1/completions", json={"prompt": PROMPT}).json()["choices"][0]
    expect(page.locator("#text")).to_have_text(choice["text"])
    expect(page.locator("[data-figure=evaluations]")).to_have_text(str(choice["nfe"]))


def test_every_step_can_be_looked_at_afterwards(page: Page, server: Server, ends: set[str]):
    settings = {"block_length": 8, "steps": 16}
    page.fill("#prompt", PROMPT)
    choose(page, **settings)
    run(page)

    expected = frames(denoised(server, "/v1/completions", {"prompt": PROMPT, **settings}), ends)
    assert len(expected) > 4
    page.focus("#slider")
    page.keyboard.press("Home")
    for i, frame in enumerate(expected):
        assert cells(page) == frame
        committed = sum(state == "committed" for state, _ in frame)
        expect(page.locator("[data-figure=committed]")).to_have_text(f"{committed} / {len(frame)}")
        expect(page.locator("#slider")).to_have_value(str(i))
        page.keyboard.press("ArrowRight")


def test_provisional_tokens_look_provisional(page: Page):
    page.fill("#prompt", PROMPT)
    run(page)
    page.focus("#slider")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")

    looks = {
        state: page.locator(f"#tokens > .{state}").first.evaluate(
            "cell => (({fontStyle, textDecorationStyle, color}) =>"
            " [fontStyle, textDecorationStyle, color])(getComputedStyle(cell))"
        )
        for state in ("provisional", "committed")
    }

    assert looks["provisional"][:2] == ["italic", "dotted"]
    assert looks["committed"][:2] == ["normal", "solid"]
    assert looks["provisional"][2] != looks["committed"][2]


def test_confidence_is_a_colour(page: Page, server: Server):
    page.fill("#prompt", PROMPT)
    run(page)

    told = denoised(server, "/v1/completions", {"prompt": PROMPT})
    start, first = told[0][1]["start"], next(step for name, step in told if name == "step")
    page.focus("#slider")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    drawn = page.locator("#tokens > .token").evaluate_all(
        "cells => cells.map(cell => Number(cell.style.getPropertyValue('--confidence')))"
    )
    for position, confidence in zip(first["positions"], first["confidence"], strict=True):
        assert drawn[position - start] == pytest.approx(confidence, abs=1e-4)


def test_the_heat_map_says_which_step_committed_a_position(page: Page, server: Server):
    page.fill("#prompt", PROMPT)
    run(page)
    page.check("#heat")

    end = denoised(server, "/v1/completions", {"prompt": PROMPT})[-1][1]
    steps = page.locator("#tokens > .token").evaluate_all("cells => cells.map(cell => cell.dataset.step)")
    assert steps == [str(step + 1) for step in end["committed_in"]]
    written = page.locator("#tokens > .token").first.evaluate(
        "cell => getComputedStyle(cell, '::after').content"
    )
    assert written == f'"{end["committed_in"][0] + 1}"'
    colours = page.locator("#tokens > .token").evaluate_all(
        "cells => cells.map(cell => getComputedStyle(cell).backgroundColor)"
    )
    assert len(set(colours)) == len(set(steps))
    expect(page.locator("#legend-heat")).to_contain_text(f"step {max(end['committed_in']) + 1}")


def test_the_steps_can_be_played(page: Page):
    page.fill("#prompt", PROMPT)
    run(page)
    last = page.locator("#slider").input_value()
    page.focus("#slider")
    page.keyboard.press("Home")

    page.click("#play")

    expect(page.locator("#play")).to_have_accessible_name("Pause")
    expect(page.locator("#slider")).to_have_value(last, timeout=20_000)
    expect(page.locator("#play")).to_have_accessible_name("Play the steps")
    assert MASK not in page.locator("#tokens").inner_text()


def test_a_run_is_drawn_while_it_goes_on_and_is_not_read_out_step_by_step(page: Page):
    page.fill("#prompt", PROMPT)
    choose(page, **SLOW)
    page.evaluate(
        """() => {
            window.said = [];
            for (const area of document.querySelectorAll("[aria-live], [role=status], [role=alert]"))
                new MutationObserver(() => window.said.push(area.textContent))
                    .observe(area, {childList: true, characterData: true, subtree: true});
        }"""
    )

    page.keyboard.press("Control+Enter")

    page.wait_for_function(
        """() => document.querySelector("#finished").hidden
            && document.querySelectorAll("#tokens .provisional").length > 0
            && document.querySelectorAll("#tokens .committed").length > 0""",
        timeout=DONE,
    )
    finish(page)
    assert len(page.evaluate("window.said")) < 10


def test_cancelling_frees_the_server_and_keeps_what_was_drawn(page: Page, server: Server):
    with server.client() as client:
        before = client.get("/v1/stats").json()["aborted"]
    page.fill("#prompt", PROMPT)
    choose(page, **SLOW)
    page.click("#run")
    expect(page.locator("#cancel")).to_be_focused()
    page.wait_for_function("() => document.querySelectorAll('#tokens .committed').length > 2", timeout=DONE)

    page.click("#cancel")

    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#run")).to_be_focused()
    server.settle()
    with server.client() as client:
        assert client.get("/v1/stats").json()["aborted"] == before + 1
    assert 2 < int(page.get_attribute("#slider", "max") or 0) < SLOW["steps"]
    expect(page.locator("#finished")).to_be_hidden()


def test_a_link_reproduces_a_run_and_its_fragment_is_not_sent(
    page: Page, context: BrowserContext, server: Server
):
    page.fill("#prompt", PROMPT)
    choose(page, temperature=30, transfer="threshold", threshold=0.4)
    run(page)
    answer, address = page.locator("#text").inner_text(), page.url

    other = context.new_page()
    sent: list[str] = []
    other.on(
        "request", lambda request: sent.append(request.url.partition("#")[0] + (request.post_data or ""))
    )
    go(other, address)
    assert not any("hats" in one for one in sent)
    expect(other.locator("#prompt")).to_have_value(PROMPT)
    expect(other.locator("#setting-threshold")).to_have_value("0.4")
    run(other)

    expect(other.locator("#text")).to_have_text(answer)
    with server.client() as client:
        cold = client.post("/v1/completions", json={"prompt": PROMPT}).json()["choices"][0]["text"]
    assert answer != cold
