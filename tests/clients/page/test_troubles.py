"""What the page says where something is wrong: links, files, connections, slots; and what a newcomer sees."""

import threading

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect  # pyright: ignore[reportMissingImports]

from jdllm.demo.examples import EXAMPLES
from tests.clients.page.drive import go, run
from tests.clients.servers import LONG, Server

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("mode", EXAMPLES)
def test_examples_fill_the_box(page: Page, mode: str):
    page.click(f"#tab-{mode}")
    assert page.locator("#examples button").all_inner_texts() == list(EXAMPLES[mode])
    page.locator("#examples button").first.click()
    box = page.locator(f"#panel-{mode} textarea").first
    expect(box).to_have_value(EXAMPLES[mode][0])
    expect(box).to_be_focused()
    run(page)
    expect(page.locator("#text")).not_to_be_empty()


def test_settings_show_what_holds(page: Page):
    for name, text in {"gen_length": "32", "steps": "32", "temperature": "0", "seed": "random"}.items():
        expect(page.locator(f"#setting-{name}")).to_have_attribute("placeholder", text)
    for name, text in {"cache": "none", "transfer": "schedule", "remasking": "low_confidence"}.items():
        shown = page.locator(f"#setting-{name}").evaluate("select => select.selectedOptions[0].text")
        assert shown == text
    page.fill("#setting-gen_length", "16")
    expect(page.locator("#setting-steps")).to_have_attribute("placeholder", "16")
    assert "default" not in page.locator("#fields").inner_text()


def test_the_long_context_s_fields_stand_side_by_side(page: Page):
    page.click("#context-part summary")
    tops = [page.locator(f"#{name}").bounding_box() for name in ("prefilling", "chunk-length", "chunks-kept")]
    assert len({round(box["y"] + box["height"] / 2) for box in tops if box}) == 1
    expect(page.locator("#chunk-length")).to_have_attribute("placeholder", "1024")


def test_the_text_stands_above_the_figures(page: Page):
    page.fill("#prompt", "1+1=")
    run(page)
    text, figures = (page.locator(at).bounding_box() for at in ("#text", "#figures"))
    assert text is not None
    assert figures is not None
    assert text["y"] < figures["y"]
    expect(page.locator("#legend-confidence")).to_contain_text("end of the text")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing masked", "Nothing is to be filled"),
        ("a ⟦8 b", "A slot is cut"),
        ("⟦2⟧ and ⟦⟧", "Slot 2 is empty"),
        ("⟦|⟧", "Slot 1 is empty"),
        ("⟦0⟧", "Slot 1 has no tokens"),
        ("⟦99999999⟧", "Slot 1 is too long"),
    ],
)
def test_slots_that_are_wrong_are_told_in_words(page: Page, text: str, words: str):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.click("#tab-infill")
    page.fill("#infill-text", text)
    page.click("#run")
    expect(page.locator("#error")).to_contain_text(words)
    expect(page.locator("#infill-text")).to_be_focused()
    assert asked == []


@pytest.mark.parametrize(
    ("fragment", "words"),
    [
        ("mode=chat&messages=[{", "its messages cannot be read"),
        ('mode=chat&messages={"role":1}', "its messages cannot be read"),
        ("mode=complete&prompt=a&prefilling=5", "its prefilling cannot be read"),
        ("mode=dance", "its mode cannot be read"),
        ("prompt=a", "its mode cannot be read"),
        ("mode=complete&prompt=a&bogus=1&transfer=none_such", "does not take: bogus, transfer"),
    ],
)
def test_a_broken_link_says_so(context: BrowserContext, server: Server, fragment: str, words: str):
    page = context.new_page()
    go(page, f"{server.url}/#{fragment}")
    expect(page.locator("#error")).to_contain_text(words)


@pytest.mark.parametrize(
    ("name", "loaded"), [("base.css", "base.css"), ("figures.js", "main.js"), ("main.js", "main.js")]
)
def test_a_file_that_does_not_load_is_named(context: BrowserContext, server: Server, name: str, loaded: str):
    page = context.new_page()
    page.route(f"**/page/{name}", lambda route: route.abort())
    page.goto(server.url)
    expect(page.locator("#broken")).to_contain_text(f"did not load (/page/{loaded})")


def test_a_connection_that_comes_back_is_used(context: BrowserContext, server: Server):
    page, failures = context.new_page(), 1

    def answer(route: Route) -> None:
        nonlocal failures
        failures -= 1
        route.abort() if failures >= 0 else route.continue_()

    page.route("**/v1/models", answer)
    page.goto(server.url)
    expect(page.locator("#error")).to_contain_text("The server does not answer")
    expect(page.locator("#run")).to_be_enabled()
    expect(page.locator("#error")).to_be_empty()


def test_requests_are_listed_and_can_be_cancelled(page: Page, context: BrowserContext, server: Server):
    stats = context.new_page()
    stats.goto(f"{server.url}/stats")
    expect(stats.locator("#no-requests")).to_be_visible()
    answers: list[int] = []

    def ask() -> None:
        with server.client() as client:
            body = {"prompt": "1+1=", "n": 2, **LONG}
            answers.append(client.post("/v1/completions", json=body).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    rows = stats.locator("#requests tbody tr")
    expect(rows).to_have_count(2, timeout=20_000)
    expect(rows.first).to_contain_text("cmpl-")
    rows.first.locator("button").click()
    expect(rows).to_have_count(0, timeout=20_000)
    asking.join()
    assert answers == [409]
