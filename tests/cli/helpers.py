"""Runs commands in this process or in one of their own, and checks how they end."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from jdllm.cli import app
from tests.conftest import LLADA as GOLDEN
from tests.helpers import Golden

LLADA, QWEN2 = GOLDEN.directory, Golden("qwen2").directory
IDS = ["--token-ids", "[[5,6,7]]"]
COMPILATION_CACHE = "JAX_COMPILATION_CACHE_DIR"
SHORT = ["--gen-length", "8", "--dtype", "float32", "--no-early-stop"]

Checkpoint = Callable[..., Path]
UseModel = Callable[[Any], None]


def run(*args: str, model: Path | None = LLADA, stdin: str | bytes = "") -> Result:
    where = [] if model is None else ["--model", str(model)]
    return CliRunner().invoke(app, ["generate", *where, *args], input=stdin)


def outputs(result: Result) -> list[dict[str, Any]]:
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)["outputs"]


def process(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run([sys.executable, "-m", "jdllm", *args], timeout=300, **(defaults | options))


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """`{"top_k": 7, "threshold_strict": True}` as `--top-k 7 --threshold-strict`."""
    given = [[f"--{name.replace('_', '-')}", str(value)] for name, value in options.items()]
    return [part for pair in given for part in (pair[:1] if pair[1] == "True" else pair)]


def assert_mistake(result: Result | subprocess.CompletedProcess[str], *words: str) -> None:
    code = result.exit_code if isinstance(result, Result) else result.returncode
    assert (code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
