"""A sharded checkpoint with all kinds of files, and its conversion."""

from pathlib import Path

import pytest

from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from jdllm.checkpoints.conversion import to_native
from jdllm.models.hf_config import config_from_hf
from tests.helpers import Golden


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sharded bf16 checkpoint with the files of a tokenizer, which no test damages."""
    path = write_random_checkpoint(
        tmp_path / "source",
        llada_hf_config(config_from_hf(Golden("llada").directory)),
        shard_bytes=50_000,
    )
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "tokenizer_config.json").write_bytes(b'{"a":\r\n 1 }')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "merges.txt").write_text("a b\n")
    (path / "tokenizer.model").write_bytes(bytes(range(256)))
    (path / "modeling_llada.py").write_text("pass\n")
    (path / "pytorch_model.bin").write_bytes(b"left behind")
    return path


@pytest.fixture
def native(tmp_path: Path, source: Path) -> Path:
    to_native(source, tmp_path / "whole")
    return tmp_path / "whole"
