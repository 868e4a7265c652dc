"""Output that cannot be written is one line on standard error and exit code 2."""

import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

from tests.cli.helpers import LLADA, process

VERSION, HELP = ["--version"], ["generate", "--help"]


@pytest.fixture
def full() -> Iterator[IO[bytes]]:
    with open("/dev/full", "wb") as device:
        yield device


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [VERSION, HELP], ids=["version", "help"])
def test_a_full_device(args: list[str], unbuffered: str, full: IO[bytes], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    result = process(*args, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 2
    assert result.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.slow
def test_a_full_device_for_generated_text(full: IO[bytes]):
    ids = ["--token-ids", "[[5]]", "--gen-length", "4"]
    result = process(
        *("generate", "--model", str(LLADA), *ids),
        **{"capture_output": False, "stdout": full, "stderr": subprocess.PIPE},
    )
    assert result.returncode == 2
    assert result.stderr == "error: the output cannot be written: No space left on device\n"


def shell(redirection: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = f"exec {sys.executable} -m jdllm {' '.join(args)} {redirection}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("args", [VERSION, HELP], ids=["version", "help"])
def test_a_closed_output(args: list[str]):
    result = shell(">&-", *args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: standard output is closed: nothing could be printed\n"


def test_without_standard_error_its_lines_do_not_go_to_standard_output():
    result = shell("2>&-", "no-such-command")
    assert (result.returncode, result.stdout) == (2, "")


def test_a_file_that_cannot_be_written_is_no_mistake_of_the_streams():
    """Errors of the system that have nothing to do with the output are not hidden."""
    code = (
        "import errno, sys; from jdllm.cli import app, convert\n"
        "def fail(*_): raise OSError(errno.ENOSPC, 'No space left on device', 'weights')\n"
        "app.command('fail')(lambda: fail()); sys.argv = ['jdllm', 'fail']; app()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Traceback" in result.stderr
