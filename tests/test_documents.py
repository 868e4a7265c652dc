"""Documents and docstrings name things that exist, and docstrings describe their arguments."""

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT

_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
_DOTTED = re.compile(r"`((?:jdllm|benchmarks|tests)(?:\.\w+)+)`")
_PATH = re.compile(r"`([a-z_]\w*(?:/[a-z_*][\w*.-]*)+/?|\w+\.py)`")
_ROOTED_PATH = re.compile(r"`((?:jdllm|benchmarks|tests|docs|convert)/[\w*./-]+)`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")

PAGES = [*ROOT.glob("*.md"), *(page for page in ROOT.glob("docs/**/*.md") if page.name != "results.md")]
SOURCES = [file for folder in ("jdllm", "benchmarks", "tests") for file in ROOT.glob(f"{folder}/**/*.py")]


def exists(name: str) -> bool:
    """Tells whether a dotted name, or a path from the root or from `jdllm/`, is there.

    A path may end in `*` patterns, lack its `.py`, or go on with a name of the module.
    """
    if "/" not in name and not name.endswith(".py"):
        return _resolves(name)
    paths = (name, f"{name}.py") if "*" not in name else (name,)
    if any(any(base.glob(path)) for base in (ROOT, ROOT / "jdllm") for path in paths):
        return True
    dotted = name.replace("/", ".")
    return _resolves(dotted if name.startswith("jdllm/") else f"jdllm.{dotted}")


def _resolves(dotted: str) -> bool:
    if (ROOT / f"{dotted.replace('.', '/')}.py").is_file():  # may import what is not installed
        return True
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def named(path: Path) -> Iterator[str]:
    text = path.read_text()
    if path.suffix == ".md":
        text = _BLOCK.sub("", text)
    for pattern in (_DOTTED, _PATH if path.suffix == ".md" else _ROOTED_PATH):
        yield from pattern.findall(text)


@pytest.mark.parametrize("path", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_is_there(path):
    assert [name for name in named(path) if not exists(name)] == []
    assert [link for link in _LINK.findall(path.read_text()) if not (path.parent / link).exists()] == []


def test_docstrings_name_what_is_there():
    lost = {str(file.relative_to(ROOT)): name for file in SOURCES for name in named(file) if not exists(name)}
    assert lost == {}


# An argument that is described elsewhere makes the reader open another file.
_ELSEWHERE = re.compile(r"\bas of\b|: as (?:in|for) `|\barguments(?: and errors)?:? as\b", re.I)


def docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield " ".join((ast.get_docstring(node) or "").split())


def test_docstrings_describe_arguments_where_they_stand():
    package = [file for file in SOURCES if file.is_relative_to(ROOT / "jdllm")]
    found = {
        f"{file.relative_to(ROOT)}: {phrase.group()}"
        for file in package
        for text in docstrings(file)
        for phrase in _ELSEWHERE.finditer(text)
    }
    assert found == set()


def test_what_is_not_there_is_found():
    there = ["jdllm.llm.LLM.generate", "models/weights", "models/weights.spec_tree", "tests/aot", "llm.py"]
    lost = ["jdllm.llm.LLM.draw", "models/loading", "models/weights.tree", "tests/silver", "lllm.py"]
    assert all(map(exists, there))
    assert not any(map(exists, lost))
