"""Two processes of each checkout share a cache directory that is theirs alone."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import first_calls


def test_each_checkout_has_two_processes_and_a_cache_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other, asked = tmp_path / "other", []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        asked.append((env["PYTHONPATH"], env["XDG_CACHE_HOME"]))
        assert "JAX_COMPILATION_CACHE_DIR" not in env
        assert Path(command[2]) == first_calls.PROCESS
        return SimpleNamespace(stdout=f"loading\n{json.dumps({'call': 'dual', 'first_s': len(asked)})}\n")

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(first_calls, "write_random_checkpoint", lambda directory, _: directory)
    monkeypatch.setenv("JDLLM_COMMIT", "abc")
    first_calls.main(["--against", str(other), "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "first_calls_llada-8b.json").read_text())["rows"]
    assert [(row["code"], row["process"], row["first_s"]) for row in rows] == [
        ("this", "first", 1),
        ("this", "second", 2),
        ("other", "first", 3),
        ("other", "second", 4),
    ]
    paths, caches = zip(*asked, strict=True)
    assert paths == (*[str(first_calls.ROOT)] * 2, *[str(other)] * 2)
    assert caches[0] == caches[1] != caches[2] == caches[3]
