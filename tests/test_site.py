"""The site of the documents: every page is in its navigation, and links follow the site's tree."""

import importlib.util
import posixpath
import re
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.helpers import ROOT


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/hooks.py, as mkdocs loads it: by its path."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(nav: list[Any]) -> list[str]:
    """The pages of a navigation, its sections included."""
    pages = []
    for entry in nav:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            pages += pages_of(target) if isinstance(target, list) else [target]
    return pages


def test_the_navigation_has_every_page_once(hooks: ModuleType):
    listed = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    inside = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    outside = [path for path in hooks.OUTSIDE if path.endswith(".md")]
    assert sorted(listed) == sorted([*inside, *outside])


def test_documents_of_the_root_are_part_of_the_site(hooks: ModuleType):
    assert {page.name for page in ROOT.glob("*.md")} <= set(hooks.OUTSIDE)
    assert [path for path in hooks.OUTSIDE if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(
    ("place", "link", "in_site"),
    [
        ("README.md", "docs/api.md", "api.md"),
        ("README.md", "docs/kernels/README.md#common", "kernels/README.md#common"),
        ("README.md", "ARCHITECTURE.md", "ARCHITECTURE.md"),
        ("serving.md", "../Dockerfile", "Dockerfile"),
        ("serving.md", "api.md#errors", "api.md#errors"),
        ("kernels/chain.md", "../../ARCHITECTURE.md", "../ARCHITECTURE.md"),
        ("kernels/chain.md", "add_norm.md", "add_norm.md"),
        ("tests/goldens/README.md", "../../docs/quirks.md", "../../quirks.md"),
        ("serving.md", "#access", "#access"),
        ("api.md", "https://a.example/x.md", "https://a.example/x.md"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(
    hooks: ModuleType, place: str, link: str, in_site: str
):
    assert hooks.site_links(f"see [a page]({link}).", place) == f"see [a page]({in_site})."


def test_every_link_leads_to_a_file_of_the_site(hooks: ModuleType):
    """What `make docs` checks too, with mkdocs."""
    lost = []
    for place in pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]):
        text = (ROOT / place if place in hooks.OUTSIDE else ROOT / "docs" / place).read_text()
        for link in re.findall(r"\]\(([^)#:\s]+)", hooks.site_links(text, place)):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
            if not (target in hooks.OUTSIDE or (ROOT / "docs" / target).is_file()):
                lost.append((place, link))
    assert lost == []
