"""Who can use the page: by keyboard, in the dark, on a small screen, without seeing it all."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect  # pyright: ignore[reportMissingImports]

from tests.clients.page.drive import PROMPT, denoised, run
from tests.clients.servers import Server

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("path", ["", "/stats"])
@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_wider_than_the_window(page: Page, server: Server, path: str, width: int):
    page.set_viewport_size({"width": width, "height": 800})
    if path:
        page.goto(server.url + path)
        expect(page.locator("#totals")).to_contain_text("Uptime")
    else:
        page.fill("#prompt", PROMPT * 3)
        run(page)
        page.check("#heat")

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_control_is_reached_by_the_keyboard_and_shows_it(page: Page):
    page.fill("#prompt", PROMPT)
    run(page)
    page.evaluate("document.activeElement.blur()")
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("a, button, input, select, textarea, summary, [tabindex='0']")]
            .filter(one => one.checkVisibility() && !one.disabled && one.tabIndex >= 0 && one.closest("body"))
            .map(one => { one.dataset.wanted = ""; return one.id || one.textContent; })"""
    )
    reached, bare = [], []
    for _ in range(len(wanted) + 5):
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(
            """() => { const one = document.activeElement;
                return ["wanted" in one.dataset ? one.id || one.textContent : "",
                        getComputedStyle(one).outlineStyle !== "none"]; }"""
        )
        reached.append(name)
        if name and not outlined:
            bare.append(name)

    assert set(wanted) <= set(reached)
    assert bare == []


def test_arrow_keys_tell_of_each_position(page: Page, server: Server):
    page.fill("#prompt", PROMPT)
    run(page)
    page.focus("#tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")

    told = denoised(server, "/v1/completions", {"prompt": PROMPT})
    start, end = told[0][1], told[-1][1]
    said = (
        f'Position {start["start"] + 1}: "{end["text"][1]}", committed in step {end["committed_in"][1] + 1},'
    )
    expect(page.locator("#inspector")).to_contain_text(said)


def test_tabs_move_by_arrow_keys(page: Page):
    page.focus("#tab-complete")
    page.keyboard.press("ArrowRight")

    expect(page.get_by_role("tab", name="Chat")).to_be_focused()
    expect(page.get_by_role("tab", name="Chat")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("tabpanel")).to_have_count(1)
    expect(page.locator("#message")).to_be_visible()


def background(page: Page) -> float:
    """The lightness of the page, from 0 to 1."""
    return page.evaluate(
        """() => { const context = document.createElement("canvas").getContext("2d");
            context.fillStyle = getComputedStyle(document.body).backgroundColor;
            context.fillRect(0, 0, 1, 1);
            return context.getImageData(0, 0, 1, 1).data[1] / 255; }"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_one_is_chosen(page: Page, scheme: Any):
    page.emulate_media(color_scheme=scheme)
    assert (background(page) < 0.5) == (scheme == "dark")

    page.click("#theme")

    assert (background(page) < 0.5) == (scheme == "light")
    page.reload()
    assert (background(page) < 0.5) == (scheme == "light")


CONTRAST = """() => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const over = (colors) => {
        for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = (rgb) =>
        rgb.reduce((sum, v, i) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
    const bad = [];
    for (const one of document.querySelectorAll("body *")) {
        const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        const unused = one.closest(":disabled, .field:has(:disabled), svg");
        const quiet = unused || one.matches(".mask, .end, option");
        if (!own || quiet || !one.checkVisibility()) continue;
        const chain = [];
        for (let at = one; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
        const below = over(chain), above = over([...chain, getComputedStyle(one).color]);
        const [high, low] = [light(below), light(above)].sort((a, b) => b - a);
        const ratio = (high + 0.05) / (low + 0.05);
        if (ratio < 4.5) bad.push([one.className || one.id || one.textContent, ratio]);
    }
    return bad;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(page: Page, scheme: Any):
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.fill("#prompt", PROMPT)
    run(page)
    last = int(page.get_attribute("#slider", "max") or 0)
    for frame in (last // 2, last):
        page.fill("#slider", str(frame))
        for heat in (False, True):
            page.set_checked("#heat", heat)
            assert page.evaluate(CONTRAST) == []


def test_who_wants_less_motion_gets_none(page: Page):
    page.emulate_media(reduced_motion="reduce")

    moving = page.evaluate(
        """() => [...document.querySelectorAll("*")].map(one => getComputedStyle(one))
            .filter(style => style.transitionDuration !== "0s" || style.animationName !== "none").length"""
    )
    assert moving == 0
