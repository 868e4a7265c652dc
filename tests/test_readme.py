"""README and guides in a new user's hands: their commands and snippets, in an environment made as they say.

A block that needs a card or a published checkpoint is preceded by a comment `<!-- not run: why -->`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.random_checkpoint import llada_hf_config
from benchmarks.shapes import SHAPES
from tests.helpers import ROOT

GUIDES = [
    ROOT / "README.md",  # first: it installs the package
    *(ROOT / "docs" / f"{name}.md" for name in ("install", "library", "commands", "memory", "models")),
    *(ROOT / "docs" / f"{name}.md" for name in ("samplers", "caching", "prefilling", "blocks", "causal")),
    ROOT / "docs" / "structured.md",
]
"""Pages of which every block runs, unless a comment says why it does not."""

CHECKED_ELSEWHERE = {
    "docs/bench.md": "tests/bench/test_trace.py",
    "docs/clients.md": "tests/clients/test_transcripts.py",
    "docs/flax.md": "tests/test_flax_page.py",
}

_BLOCK = re.compile(r"(?P<left_out><!-- not run: [^\n]+ -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.S)
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".pytest_cache", ".ruff_cache", ".hypothesis", "__pycache__"
)
_MAKE = re.compile(r"^make (\w+)")


class Block(NamedTuple):
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines after prompts, each with its continuation lines."""
        return re.findall(r"^\$ ((?:.*\\\n)*.*)", self.text, re.M)


def blocks(language: str, pages: Sequence[Path] = GUIDES) -> list[Block]:
    """The blocks of pages that run, in order; a block that stands on two pages is there once."""
    found = [m for page in pages for m in _BLOCK.finditer(page.read_text()) if not m["left_out"]]
    return list(dict.fromkeys(Block(m["language"], m["text"]) for m in found if m["language"] == language))


def commands() -> list[str]:
    """The commands of all blocks, each once."""
    return list(dict.fromkeys(command for block in blocks("console") for command in block.commands))


def run(command: list[str], directory: Path, path: Path | None = None) -> str:
    """What a command prints, with the programs of `path` before others; errors are shown where it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh copy of the repository, beside which its user works."""
    target = tmp_path_factory.mktemp("user") / "jdllm"
    shutil.copytree(ROOT, target, ignore=_LEFT_OUT)
    return target


@pytest.fixture(scope="module")
def project(sources: Path) -> Path:
    """A directory that is no checkout, with the files that the README's commands read."""
    directory = sources.parent
    (directory / "llada-8b").mkdir()
    (directory / "llada-8b" / "config.json").write_text(json.dumps(llada_hf_config(SHAPES["llada-8b"])))
    (directory / "question.txt").write_text("12+34=\n")
    (directory / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "7+8="}\n')
    return directory


def test_every_page_with_snippets_is_run_or_checked():
    """A snippet that moves to another page keeps its test."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    with_snippets = {page for page in pages if "```python\n" in page.read_text()}
    assert with_snippets <= {*GUIDES, *(ROOT / page for page in CHECKED_ELSEWHERE)}
    assert all((ROOT / test).exists() for test in CHECKED_ELSEWHERE.values())


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.slow
def test_what_make_does_works_in_a_fresh_copy(sources: Path):
    """`demo` and `serve` are the README's two commands; `serve` runs until it is stopped."""
    assert {m[1] for command in commands() if (m := _MAKE.match(command))} == {"demo", "serve"}
    run(["make", "demo", f"PYTHON={sys.executable}"], sources)


@pytest.mark.slow
def test_commands_and_snippets(project: Path):
    run([sys.executable, "-m", "venv", "environment"], project)
    programs = project / "environment" / "bin"
    for command in commands():
        if not _MAKE.match(command):
            run(["bash", "-euo", "pipefail", "-c", command], project, programs)
    snippets = blocks("python")
    assert snippets
    for snippet in snippets:
        run([str(programs / "python"), "-W", "error", "-c", snippet.text], project, programs)
