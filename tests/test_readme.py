"""The README in a new user's hands: its commands and snippets, in an environment made as it says.

A block that needs a card or a published checkpoint is preceded by a comment `<!-- not run: why -->`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.random_checkpoint import llada_hf_config
from benchmarks.shapes import SHAPES
from tests.helpers import ROOT

pytestmark = pytest.mark.slow

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


def blocks(language: str) -> list[Block]:
    found = [m for m in _BLOCK.finditer((ROOT / "README.md").read_text()) if not m["left_out"]]
    return [Block(m["language"], m["text"]) for m in found if m["language"] == language]


def run(command: list[str], directory: Path, path: Path | None = None) -> None:
    """Run a command, with the programs of `path` before others; what it prints is shown where it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


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


def test_what_make_does_works_in_a_fresh_copy(sources: Path):
    """Of its targets `demo` sets everything up; `test` is the lane that runs on every change."""
    targets = {m[1] for b in blocks("console") for c in b.commands if (m := _MAKE.match(c))}
    assert {"demo", "test"} <= targets
    run(["make", "demo", f"PYTHON={sys.executable}"], sources)


def test_commands_and_snippets(project: Path):
    run([sys.executable, "-m", "venv", "environment"], project)
    programs = project / "environment" / "bin"
    for block in blocks("console"):
        for command in block.commands:
            if not _MAKE.match(command):
                run(["bash", "-euo", "pipefail", "-c", command], project, programs)
    snippets = blocks("python")
    assert snippets
    for snippet in snippets:
        run([str(programs / "python"), "-W", "error", "-c", snippet.text], project, programs)
