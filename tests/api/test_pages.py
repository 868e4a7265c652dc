"""The bundle of the page: what it is answered with, and that it needs no other host."""

import re
from importlib.resources import files

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from jdllm.api.pages import router

TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGES = {"/": "index.html", "/stats": "stats.html"}
FOLDER = files("jdllm.api").joinpath("page")
SOURCES = {entry.name: entry.read_text() for entry in FOLDER.iterdir()}
PATHS = [*PAGES, *(f"/page/{name}" for name in SOURCES)]
FORBIDDEN = {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"}


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(router)
    return TestClient(app)


def suffix(name: str) -> str:
    return name[name.rindex(".") :]


def named_in(source: str) -> set[str]:
    """What a file of the bundle loads or leads to."""
    found = re.findall(r"""(?:href|src)=["']([^"']+)["']|(?:from|import) ["']([^"']+)["']""", source)
    return {first or second for first, second in found}


@pytest.mark.parametrize("path", PATHS)
def test_every_file_is_answered_as_what_it_is(client: TestClient, path: str):
    name = PAGES.get(path) or path.removeprefix("/page/")

    response = client.get(path)

    assert response.status_code == 200
    assert response.headers["content-type"].partition(";")[0] == TYPES[suffix(name)]
    assert response.text == SOURCES[name]


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_allows_only_the_bundle_itself(client: TestClient, path: str):
    headers = client.get(path).headers

    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy.pop("img-src") == "'self' data:"
    own = {name for name, sources in policy.items() if sources == "'self'"}
    assert own == {"script-src", "style-src", "connect-src"}
    none = {name for name, sources in policy.items() if sources == "'none'"}
    assert none == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert own | none == set(policy)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_a_browser_has_is_not_sent_again(client: TestClient, path: str):
    first = client.get(path)
    tag = first.headers["etag"]

    again = client.get(path, headers={"If-None-Match": f'"other", W/{tag}'})
    stale = client.get(path, headers={"If-None-Match": '"other"'})

    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == tag
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert (stale.status_code, stale.content) == (200, first.content)
    assert first.headers["cache-control"] == "no-cache"


def test_different_files_have_different_tags(client: TestClient):
    assert len({client.get(f"/page/{name}").headers["etag"] for name in SOURCES}) == len(SOURCES)


def test_head_says_the_same_without_a_body(client: TestClient):
    asked, head = client.get("/"), client.head("/")

    assert (head.status_code, head.content) == (200, b"")
    assert head.headers == asked.headers


@pytest.mark.parametrize(
    "path",
    ["/page/pages.py", "/page/..%2fpages.py", "/page/%2e%2e%2fpages.py", "/page/", "/page/a/b", "/page/."],
)
def test_nothing_else_is_answered(client: TestClient, path: str):
    assert client.get(path).status_code == 404


def test_pages_are_not_part_of_the_api():
    app = FastAPI()
    app.include_router(router)

    assert app.openapi()["paths"] == {}


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_names_no_other_host(name: str):
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]+[^\s\"'>]*", SOURCES[name]))

    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name of XML, which nobody asks for


@pytest.mark.parametrize("name", SOURCES)
def test_what_a_file_loads_is_in_the_bundle(name: str):
    linked = {link.removeprefix("page/").removeprefix("./") for link in named_in(SOURCES[name])}
    pages = {"", "stats", "#main"}

    assert linked - pages <= set(SOURCES)


def test_every_script_and_style_is_used():
    used = {link.rsplit("/", 1)[-1] for source in SOURCES.values() for link in named_in(source)}

    assert set(SOURCES) - used == set(PAGES.values())


@pytest.mark.parametrize("name", [name for name in SOURCES if suffix(name) == ".html"])
def test_a_page_has_nothing_inline(name: str):
    source = SOURCES[name]

    assert re.findall(r"<script[^>]*>([^<]*)</script>", source) == [""] * source.count("<script")
    assert re.search(r"<style|\sstyle=|\son\w+=|javascript:", source) is None


@pytest.mark.parametrize("name", [name for name in SOURCES if suffix(name) == ".js"])
def test_a_script_makes_no_markup_of_text(name: str):
    assert [word for word in FORBIDDEN if word in SOURCES[name]] == []
