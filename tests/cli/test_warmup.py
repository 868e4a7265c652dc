"""Where commands keep what they compile, and `jdllm warmup`, which compiles it before."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from jdllm.cli import app
from jdllm.compiling.executables import Prepared
from jdllm.decoding.prefilling import PRESETS, Prefilling
from jdllm.errors import ConfigError
from jdllm.llm import LLM
from tests.cli.helpers import (
    COMPILATION_CACHE,
    IDS,
    LLADA,
    QWEN2,
    SHORT,
    as_arguments,
    assert_mistake,
    process,
    run,
)

COMMANDS = {
    "generate": IDS,
    "infill": IDS,
    "score": ["a", "b"],
    "eval": ["--task", "addition"],
    "warmup": [],
}
OPTIONS = {
    "dtype": "float32",
    "memory": "1GiB",
    "host_memory": "2GiB",
    "max_num_batched_tokens": 96,
    "cache_dir": Path("kept"),
    "verifier": str(QWEN2),
    "verifier_shares_ids": True,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which a command makes an `LLM`, which it is refused."""
    found: dict[str, Any] = {}

    def refuse(**arguments: Any) -> None:
        found.update(arguments)
        raise ConfigError("refused")

    monkeypatch.setattr("jdllm.llm.LLM", refuse)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_runs_a_model_makes_it_as_its_options_say(command: str, asked: dict[str, Any]):
    given = as_arguments(OPTIONS)
    where = [str(LLADA)] if command == "warmup" else ["--model", str(LLADA)]
    assert_mistake(CliRunner().invoke(app, [command, *where, *COMMANDS[command], *given]), "refused")
    assert asked.items() >= OPTIONS.items()
    assert asked["model"] == LLADA
    assert asked.get("load_weights", True) == (command != "warmup")


def test_what_no_option_says_is_the_librarys_default(asked: dict[str, Any]):
    run(*IDS)
    defaults = {name: p.default for name, p in inspect.signature(LLM).parameters.items()}
    assert {name: value for name, value in asked.items() if name != "model"}.items() <= defaults.items()


def test_executables_are_kept_where_the_library_keeps_them(asked: dict[str, Any]):
    run(*IDS)
    assert asked["cache_dir"] == inspect.signature(LLM).parameters["cache_dir"].default == "auto"


def test_nothing_is_kept_where_one_says_so(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    run(*IDS, "--cache-dir", "none")
    assert asked["cache_dir"] is None
    assert not (tmp_path / "caches").exists()
    assert_mistake(CliRunner().invoke(app, ["warmup", str(LLADA), "--cache-dir", "none"]), "--cache-dir")


def test_a_cache_directory_that_cannot_be_is_a_mistake_where_it_was_asked_for(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    assert_mistake(run(*IDS, *SHORT, "--cache-dir", str(file / "below")), str(file))


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ([], "compiled 3 executables and found 4 in 5.2 s, in kept\n"),
        (["--prefilling", "dream"], "compiled 3 executables and found 4 in 5.2 s, in kept\n"),
        (["--json"], '{"compiled": 3, "loaded": 4, "seconds": 5.25, "cache_dir": "kept"}\n'),
    ],
)
def test_warming_up_says_what_it_took(options: list[str], printed: str, monkeypatch: pytest.MonkeyPatch):
    class Warm:
        executables = SimpleNamespace(store=SimpleNamespace(directory="kept"))
        engine = SimpleNamespace(scheduler=SimpleNamespace(share=lambda: None))

        def __init__(self, **_: Any): ...

        def warmup(self, prefilling: Prefilling | None = None) -> Prepared:
            asked.append(prefilling)
            return Prepared(3, 4, 5.25)

    asked: list[Prefilling | None] = []
    monkeypatch.setattr("jdllm.llm.LLM", Warm)
    result = CliRunner().invoke(app, ["warmup", str(LLADA), "--cache-dir", "kept", *options])
    assert (result.exit_code, result.stdout, result.stderr) == (0, printed, "")
    assert asked == [PRESETS["dream"] if "--prefilling" in options else None]


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [None, str(QWEN2)], ids=["alone", "with a verifier"])
def test_what_was_compiled_before_is_compiled_by_nobody_again(
    verifier: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Neither by a model with the weights that warming up does not read, nor by another command."""
    monkeypatch.delenv(COMPILATION_CACHE, raising=False)  # what JAX's own cache has is not kept again
    kept = tmp_path / "kept"
    options = ["--dtype", "float32", "--max-num-batched-tokens", "32", "--cache-dir", str(kept)]
    samplings = [SHORT]
    if verifier is not None:
        options += ["--verifier", verifier]
        samplings = [[*SHORT, "--transfer", "adaptive", "--cache", cache] for cache in ("none", "dual")]
    first = json.loads(process("warmup", str(LLADA), *options, "--json").stdout)
    files = {path.name for path in kept.iterdir()}
    assert first["compiled"] == len(files) > 3
    library = (
        "import sys; from jdllm import LLM;"
        "given = {'cache_dir': sys.argv[2], 'verifier': sys.argv[3] if sys.argv[3:] else None};"
        "llm = LLM(sys.argv[1], dtype='float32', max_num_batched_tokens=32, **given);"
        "print(list(llm.warmup()[:2]))"
    )
    command = [
        sys.executable,
        "-c",
        library,
        str(LLADA),
        str(kept),
        *([] if verifier is None else [verifier]),
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(found.stdout) == [0, len(files)]
    for sampling in samplings:
        answer = process("generate", "--model", str(LLADA), *IDS, *sampling, *options, "--json")
        assert len(json.loads(answer.stdout)["outputs"][0]["token_ids"]) == 8
    assert {path.name for path in kept.iterdir()} == files
