"""Two processes share a cache of compiled programs that nobody else has filled."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import first_token


def test_the_second_process_finds_what_the_first_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        cache = Path(command[-1])
        found = cache.exists()
        cache.mkdir(exist_ok=True)
        assert "JAX_COMPILATION_CACHE_DIR" not in env
        assert env["PATH"] == os.environ["PATH"]
        return SimpleNamespace(stdout=f"loading\n{json.dumps({'beyond_load_s': 1.0 if found else 9.0})}\n")

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(first_token, "write_random_checkpoint", lambda directory, _: directory)
    monkeypatch.setenv("JDLLM_COMMIT", "abc")
    first_token.main(["--prompt", "7", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "first_token_llada-8b.json").read_text())["rows"]
    assert [(row["process"], row["prompt"], row["beyond_load_s"]) for row in rows] == [
        ("first", 7, 9.0),
        ("second", 7, 1.0),
    ]
    assert asked[0] == asked[1]
    assert asked[0][1:6] == ["-m", "benchmarks", "first_token", "--prompt", "7"]
    assert asked[0][-3] == "--child"
