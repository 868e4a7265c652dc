"""What the page asks the server for: conversations, infilling, presets, keys; and the page of figures."""

import json
import re

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect  # pyright: ignore[reportMissingImports]

from tests.clients.page.drive import PROMPT, choose, finish, go, run
from tests.clients.servers import Server, until

pytestmark = pytest.mark.clients


def test_a_conversation_goes_on(page: Page, server: Server):
    page.click("#tab-chat")
    asked: list[list[dict[str, str]]] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            asked.append(json.loads(request.post_data or "")["messages"])

    page.on("request", note)
    page.fill("#message", PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_have_value("")
    finish(page)
    page.fill("#message", "12+34=")
    run(page)

    first, second = asked
    assert first == [{"role": "user", "content": PROMPT}]
    with server.client() as client:
        answers = [
            client.post("/v1/chat/completions", json={"messages": messages}).json()["choices"][0]["message"]
            for messages in asked
        ]
    assert second == [*first, {"role": "assistant", "content": answers[0]["content"]}, second[-1]]
    expect(page.locator("#turns .said")).to_have_text(
        [PROMPT, answers[0]["content"], "12+34=", answers[1]["content"]]
    )


def test_masked_spans_and_choices_are_filled(page: Page, server: Server):
    page.click("#tab-infill")
    text = page.locator("#infill-text")
    text.fill("12+34=46 and Tom has 4 red cups.")
    text.evaluate("area => area.setSelectionRange(6, 8)")
    page.click("#mask")
    expect(text).to_have_value("12+34=⟦2⟧ and Tom has 4 red cups.")
    text.evaluate("area => area.setSelectionRange(area.value.indexOf('red'), area.value.indexOf(' cups'))")
    page.click("#choice")
    page.keyboard.type("blue|pink")
    expect(text).to_have_value("12+34=⟦2⟧ and Tom has 4 ⟦red|blue|pink⟧ cups.")
    run(page)

    parts = [
        "12+34=",
        {"type": "text", "max_tokens": 2},
        " and Tom has 4 ",
        {"type": "choice", "options": ["red", "blue", "pink"]},
        " cups.",
    ]
    with server.client() as client:
        filled = client.post("/v1/infill", json={"parts": parts}).json()["choices"][0]
    expect(page.locator("#text")).to_have_text(filled["text"])
    expect(page.locator(".slot-text")).to_have_text([slot["text"] for slot in filled["slots"]])
    rows = [row.locator("td").all_inner_texts() for row in page.locator(".options tr").all()]
    for (_, text, _, share), option in zip(rows, filled["slots"][1]["options"], strict=True):
        assert text == option["text"]
        assert float(share.removesuffix("%")) == pytest.approx(100 * option["probability"], abs=0.5)
    chosen = filled["slots"][1]["chosen"]
    assert [bool(row[0]) for row in rows] == [i == chosen for i in range(3)]


def test_choices_alone_need_no_steps(page: Page):
    page.click("#tab-infill")
    page.fill("#infill-text", "1+1=⟦2|7⟧")

    run(page)

    expect(page.locator("#text")).to_have_text("1+1=2")
    expect(page.locator("#steps-part")).to_be_hidden()


def test_texts_are_never_markup_and_characters_come_whole(page: Page):
    markup = "<b>é</b><img src=x onerror=alert(1)>"
    page.click("#tab-infill")
    page.fill("#infill-text", f"{markup}⟦2⟧")

    run(page)

    assert page.locator("#text").inner_text().startswith(markup)
    assert page.locator("#result b, #result img").count() == 0


def test_the_message_of_the_server_is_shown(page: Page, server: Server):
    wrong = {"gen_length": 16, "block_length": 5}
    page.fill("#prompt", PROMPT)
    choose(page, **wrong)
    page.keyboard.press("Control+Enter")

    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": PROMPT, **wrong})
    assert answer.status_code == 400
    expect(page.get_by_role("alert")).to_have_text(answer.json()["error"]["message"])
    expect(page.locator("#result")).to_be_hidden()


def test_a_number_out_of_bounds_is_shown_at_its_field(page: Page):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.fill("#prompt", PROMPT)
    choose(page, temperature=-1)
    page.set_viewport_size({"width": 360, "height": 800})
    expect(page.locator("#setting-temperature")).to_be_hidden()

    page.click("#run")

    expect(page.locator("#setting-temperature")).to_be_focused()
    assert asked == []


def test_presets_are_taken_by_the_server(page: Page):
    page.fill("#prompt", PROMPT)
    presets = page.locator("#preset option").all_inner_texts()
    for preset in presets[:-1]:
        page.select_option("#preset", label=preset)
        run(page)
        expect(page.locator("#preset")).to_have_value(preset)
    choose(page, temperature=0.7)
    expect(page.locator("#preset")).to_have_value(presets[-1])


def test_the_key_is_asked_for_and_kept_for_the_session_only(browser: Browser, server: Server):
    assert server.api_key is not None
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("did not accept")
        page.keyboard.type(server.api_key)
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#run")).to_be_enabled()

        kept = page.evaluate(
            "[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]"
        )
        assert server.api_key in kept[0]
        assert server.api_key not in kept[1] + kept[2] + page.url
        go(page, server.url)
        expect(dialog).to_be_hidden()


def test_the_browser_asks_no_other_host(page: Page, server: Server):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.fill("#prompt", PROMPT)
    page.reload()
    page.fill("#prompt", PROMPT)
    run(page)
    page.click("text=Stats")
    expect(page.locator("#totals")).to_contain_text("Uptime")

    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(server.url)] == []


def test_stats_are_those_of_the_api(page: Page, context: BrowserContext, server: Server):
    stats = context.new_page()
    stats.goto(f"{server.url}/stats")
    expect(stats.locator(".chart")).to_have_count(6)
    page.fill("#prompt", PROMPT)
    run(page)

    with server.client() as client:
        counts = client.get("/v1/stats").json()
    for title, name in {"Requests finished": "finished", "Tokens committed": "tokens"}.items():
        row = stats.locator("#totals tr", has_text=title)
        expect(row.locator("td")).to_have_text(f"{counts[name]:,}")
    most = stats.locator("#rates tr", has_text="Rows a second, full").locator("td").last
    until(lambda: float(re.sub(r"[^\d.]", "", most.inner_text()) or 0) > 0, 10.0)
    errors = sum(count for status, count in counts["http"]["statuses"].items() if int(status) >= 400)
    expect(stats.locator("#totals tr", has_text="HTTP errors").locator("td")).to_have_text(f"{errors:,}")
    latency = stats.locator("#rates tr", has_text="Latency, median").locator("td").last
    assert float(re.sub(r"[^\d.]", "", latency.inner_text())) > 0
    drawn = stats.locator("polyline.series-0").evaluate_all("lines => lines.map(line => line.points.length)")
    assert min(drawn) > 0
