"""Where a checkpoint is: a directory, or the hub."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from jdllm.checkpoints.loading import resolve
from jdllm.errors import CheckpointError
from tests.helpers import Golden

GOLDEN = Golden("llada")


def test_a_directory_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
    assert resolve("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    "model", ["./org/name", "/org/name", "~/name", "../name", "a/b/c", "name", Path("org/name")]
)
def test_a_path_is_never_asked_of_the_hub(monkeypatch, model):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="no directory"):
        resolve(model)


@pytest.mark.parametrize("model", ["~nobody-of-that-name/model", "x" * 5000])
def test_a_path_that_cannot_exist_is_refused(model):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        resolve(model)


def test_a_file_is_no_checkpoint():
    file = GOLDEN.directory / "config.json"
    with pytest.raises(CheckpointError, match=f"{file} is a file"):
        resolve(file)


def test_a_hub_id_is_downloaded_without_other_files(monkeypatch, tmp_path):
    files = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]
    others = [
        "modeling_llada.py",
        "pytorch_model.bin",
        "README.md",
        "onnx/model.safetensors",
        "consolidated.safetensors",
        "consolidated.00.pth",
        "original/params.json",
        "original/consolidated.00.pth",
    ]

    def snapshot_download(repo_id, **patterns):
        kept = huggingface_hub.utils.filter_repo_objects(files + others, **patterns)
        assert repo_id == "org/model-8B.v1"
        assert list(kept) == files
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/model-8B.v1") == tmp_path


def test_an_unreachable_hub_names_the_model(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="no directory nobody/nothing, and the hub does not give"):
        resolve("nobody/nothing")
