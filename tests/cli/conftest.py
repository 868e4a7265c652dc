"""Checkpoints with other configurations or a tokenizer, and models that commands need not load."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jdllm.llm import LLM
from tests.cli.helpers import COMPILATION_CACHE, LLADA, Checkpoint, UseModel


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands keep executables for other tests of this run, and nothing in the user's directory; their
    processes compile with the cache of this one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "caches"))
    if jax.config.jax_compilation_cache_dir is not None:
        monkeypatch.setenv(COMPILATION_CACHE, jax.config.jax_compilation_cache_dir)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, standard error says nothing of compiling where no test asks for it."""
    monkeypatch.setattr("jdllm.cli.compiling.UNWATCHED_PATIENCE", 3600.0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Copies the tiny checkpoint, with some keys of its `config.json` replaced."""

    def make(**keys: Any) -> Path:
        directory = tmp_path / "checkpoint"
        directory.mkdir()
        shutil.copy(LLADA / "model.safetensors", directory)
        config = json.loads((LLADA / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | keys))
        return directory

    return make


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a tokenizer in which id 5 is the word `w5`."""
    directory = tmp_path_factory.mktemp("speaking")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(LLADA / name, directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}{% if more %} w{{ more }}{% endif %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def loaded_speaking(speaking: Path) -> LLM:
    return LLM(speaking, dtype="float32")


@pytest.fixture
def use_model(monkeypatch: pytest.MonkeyPatch) -> UseModel:
    """Has the commands use a model that is already loaded and compiled."""

    def use(llm: Any) -> None:
        for command in ("generate", "evaluate", "infill", "run_batch", "score"):
            monkeypatch.setattr(f"jdllm.cli.{command}.load_model", lambda *_: llm)

    return use
