"""The command line in a process of its own: warnings, signals, pipes and its display in a terminal."""

import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.cli.helpers import COMPILATION_CACHE, IDS, LLADA, SHORT, Checkpoint, assert_mistake, process


@pytest.mark.slow
def test_an_overlong_prompt_warns(checkpoint: Checkpoint):
    directory = checkpoint(max_sequence_length=10)
    result = process("generate", "--model", str(directory), *IDS, *SHORT, "--json")
    assert result.returncode == 0
    assert len(json.loads(result.stdout)["outputs"][0]["token_ids"]) == 8
    assert result.stderr.startswith("warning: ")
    assert "10 positions" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["generate"], ["serve"], ["bench", "serve"], ["plan"]])
def test_help_loads_nothing_that_takes_long(command: list[str]):
    code = (
        "import sys; from typer.testing import CliRunner; from jdllm.cli import app;"
        f"result = CliRunner().invoke(app, [*{command}, '--help']);"
        "assert result.exit_code == 0, result.output; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert not {"jax", "numpy", "transformers", "flax"} & set(loaded.stdout.split())


def test_help_takes_little_of_the_processor():
    """Its goal is 0.6 s, which a machine of half the speed takes twice as long for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = process("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "generate" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.mark.slow
def test_a_model_from_a_directory_needs_no_flax():
    """Importing Flax takes longer than a short answer."""
    code = "import sys, jdllm.cli, jdllm.llm; assert 'jax' in sys.modules; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_terminal_without_a_prompt_is_not_waited_for():
    master, slave = pty.openpty()
    try:
        assert_mistake(process("generate", "--model", str(LLADA), stdin=slave), "no prompt")
    finally:
        os.close(master)
        os.close(slave)


@pytest.fixture
def ctrl_c_heeded() -> Iterator[None]:
    """Shells start what runs in the background with this signal ignored, which children inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_heeded")
def test_ctrl_c_exits_quietly(tmp_path: Path):
    os.mkfifo(tmp_path / "prompt")
    command = [sys.executable, "-m", "jdllm", "generate", "--file", str(tmp_path / "prompt")]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child,
        (tmp_path / "prompt").open("w"),  # opens only once the command reads
    ):
        child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=60)
    assert (child.returncode, stdout, stderr) == (130, b"", b"")


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = process(
            *("generate", "--model", str(LLADA), *IDS, *SHORT),
            capture_output=False,
            stdout=writer,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.slow
def test_the_text_fills_in_in_a_terminal(speaking: Path, loaded_speaking: LLM, tmp_path: Path):
    directory = tmp_path / "short context"
    shutil.copytree(speaking, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_sequence_length": 10}))
    master, slave = pty.openpty()
    names = "PATH", "XDG_CACHE_HOME", COMPILATION_CACHE
    inherited = {name: os.environ[name] for name in names if name in os.environ}
    environment = {"TERM": "xterm", "COLUMNS": "200", **inherited}
    command = [sys.executable, "-m", "jdllm", "generate", "--model", str(directory), "w5 w6 w7", *SHORT]
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environment
    ) as child:
        os.close(slave)
        shown = _read_terminal(master).replace("\r\n", "\n")
        assert child.stderr is not None
        assert child.stderr.read().startswith(b"warning: ")
    assert child.returncode == 0
    assert "░" * 8 in shown
    assert "\x1b[2m" in shown
    sampling = SamplingParams(gen_length=8, early_stop=False)
    (expected,) = loaded_speaking.generate("w5 w6 w7", sampling=sampling)
    assert shown.endswith(f"{expected.text}\n")


def _read_terminal(master: int) -> str:
    chunks = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # how Linux reports that the other side was closed
            chunk = b""
        if not chunk:
            os.close(master)
            return b"".join(chunks).decode()
        chunks.append(chunk)
