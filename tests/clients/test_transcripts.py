"""The transcripts of docs/clients.md: curl and the `openai` package against a real server.

Others take longer; they are asked in files of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients.servers import Server
from tests.helpers import ROOT

pytestmark = pytest.mark.clients

ADDRESS, ANY_KEY = "http://127.0.0.1:8000", 'api_key="any"'
"""Of the page's server."""

_CONSOLE = re.compile(r"^```console\n([^`]*)^```$", re.M)
_COMMAND = re.compile(r"^\$ (curl .*\n(?: .*\n)*)((?:[^$].*\n)*)", re.M)
_SNIPPET = re.compile(r"^```python\n([^`]*)^```\n\n```text\n([^`]*)^```$", re.M)
_DIFFERENT = re.compile(r"\b[0-9a-f]{32}\b|\b\d{10,}\b|-?\b\d+\.\d+(?:e-?\d+)?\b|\s")
"""Ids, times, seeds and probabilities differ from run to run, and lines are broken on the page."""


class Transcript(NamedTuple):
    program: list[str]
    printed: str


def transcripts() -> list[Transcript]:
    page = (ROOT / "docs" / "clients.md").read_text()
    commands = [found for block in _CONSOLE.findall(page) for found in _COMMAND.findall(block)]
    snippets = [
        found
        for found in _SNIPPET.findall(page)
        if "openai import" in found[0] or "import openai" in found[0]
    ]
    return [
        *(Transcript(["bash", "-c", command], printed) for command, printed in commands),
        *(Transcript([sys.executable, "-c", code], printed) for code, printed in snippets),
    ]


def pattern(printed: str) -> str:
    return ".*".join(re.escape(_DIFFERENT.sub("", part)) for part in printed.split("..."))


@pytest.fixture(scope="module")
def environment(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which curl sends the key."""
    home: Path = tmp_path_factory.mktemp("curl")
    (home / ".curlrc").write_text(f'silent\nheader = "Authorization: Bearer {server.api_key}"\n')
    return {**os.environ, "CURL_HOME": str(home), "NO_PROXY": "*"}


@pytest.mark.parametrize("transcript", transcripts(), ids=lambda one: one.program[0].rpartition("/")[2])
def test_a_transcript(server: Server, environment: dict[str, str], transcript: Transcript):
    *program, text = transcript.program
    text = text.replace(ADDRESS, server.url).replace(ANY_KEY, f'api_key="{server.api_key}"')
    done = subprocess.run([*program, text], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(pattern(transcript.printed), _DIFFERENT.sub("", done.stdout)), done.stdout
    server.settle()


def test_there_are_transcripts():
    assert [one.program[0] for one in transcripts()].count("bash") == 4
    assert len(transcripts()) == 7
