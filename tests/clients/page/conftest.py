"""The page in Chromium."""

import json
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright  # pyright: ignore[reportMissingImports]

from tests.clients.page.drive import go
from tests.clients.servers import Server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program is not None, "these tests need the distribution's chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser, server: Server) -> Iterator[BrowserContext]:
    """A browser that was given the key before, and that nobody asks for one."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        context.add_init_script(f"sessionStorage.setItem('jdllm-api-key', {json.dumps(server.api_key)})")
        yield context


@pytest.fixture
def page(context: BrowserContext, server: Server) -> Iterator[Page]:
    """The page, connected. What the browser complains about fails the test, but for answers of errors."""
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    go(page, server.url)
    yield page
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []
