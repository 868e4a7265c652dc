"""A head that the configuration ties to the embedding, and that is stored all the same."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdllm.checkpoints import loading
from jdllm.checkpoints.conversion import to_native
from jdllm.errors import CheckpointError
from jdllm.models.hf_config import config_from_hf
from tests.helpers import Golden

FAMILIES = {
    "qwen2": ("model.embed_tokens.weight", "lm_head.weight", "tie_word_embeddings"),
    "llada": ("model.transformer.wte.weight", "model.transformer.ff_out.weight", "weight_tying"),
}


@pytest.fixture(params=FAMILIES)
def tied(request, tmp_path, monkeypatch) -> tuple[Path, str, str]:
    """A checkpoint with its head stored as the embedding is, read in several pieces, and both names."""
    embedding, head, key = FAMILIES[request.param]
    directory = Path(shutil.copytree(Golden(request.param).directory, tmp_path / "checkpoint"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {key: True}))
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {head: tensors[embedding].copy()}, directory / "model.safetensors")
    monkeypatch.setattr(loading, "PIECE_BYTES", 10_000)
    return directory, embedding, head


def load(directory: Path) -> None:
    loading.load_params(directory, config_from_hf(directory), "float32")


def test_the_same_head_may_be_stored(tied):
    load(tied[0])


@pytest.mark.parametrize("how", ["value", "type"])
@pytest.mark.parametrize("reader", [load, lambda path: to_native(path, path.with_name("native"))])
def test_another_head_is_refused(tied, how, reader):
    directory, embedding, head = tied
    tensors = load_file(directory / "model.safetensors")
    if how == "value":
        tensors[head][-1, -1] += 1
    else:
        tensors[head] = tensors[head].astype(np.float16)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{head} in .*model.safetensors differs from {embedding}"):
        reader(directory)
    assert not directory.with_name("native").exists()
