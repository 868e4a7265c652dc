"""CI runs the next part of the longer lanes after each commit, and a valid one without a history."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT

# Settings of the user's, and of a commit that runs these tests as its hook, are none of this repository's.
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CEILING_DIRECTORIES": "/",
}


def git(directory: Path, *arguments: str) -> None:
    named = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(
        ["git", *named, *arguments], cwd=directory, env=ENVIRONMENT, check=True, capture_output=True
    )


def part(directory: Path) -> str:
    run = subprocess.run(
        [directory / ".ci" / "part"], env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    return run.stdout.strip()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A directory with CI's script alone."""
    directory = tmp_path / "repository"
    (directory / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "part", directory / ".ci")
    return directory


def test_three_commits_in_a_row_take_all_parts(copied: Path):
    git(copied, "init")
    git(copied, "add", ".")
    parts: list[str] = []
    for _ in range(4):
        git(copied, "commit", "--allow-empty", "--message", "a")
        parts.append(part(copied))
    assert parts == ["2/3", "3/3", "1/3", "2/3"]


def test_a_shallow_clone_and_no_clone_take_a_part(copied: Path, tmp_path: Path):
    assert part(copied) in ("1/3", "2/3", "3/3")

    git(copied, "init")
    git(copied, "add", ".")
    for _ in range(2):
        git(copied, "commit", "--allow-empty", "--message", "a")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--depth", "1", f"file://{copied}", str(shallow))
    assert part(shallow) in ("1/3", "2/3", "3/3")
