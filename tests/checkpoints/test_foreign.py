"""Paths that are no checkpoint: one line says what they are, and what to do."""

import json
import shutil
from pathlib import Path

import pytest

from jdllm.checkpoints.loading import resolve
from jdllm.errors import CheckpointError, ConfigError
from jdllm.models.hf_config import config_from_hf
from tests.helpers import Golden

GOLDEN = Golden("llada")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456789\n"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(GOLDEN.directory, tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"]
)
def test_a_pointer_of_git_lfs_is_named_with_its_remedy(copy: Path, name: str):
    (copy / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        resolve(copy)


@pytest.mark.parametrize("name", ["picture.png", "consolidated.safetensors", "pytorch_model.bin"])
def test_a_pointer_that_is_never_read_harms_nothing(copy: Path, name: str):
    (copy / name).write_text(POINTER)
    assert resolve(copy) == copy


def test_an_adapter_is_named_with_its_base_model(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"adapter \(PEFT.* of org/base.*`LLM\(model, adapter=...\)`, `--adapter`"
    ):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "pickles"),
        ("pytorch_model-00001-of-00002.bin", "pickles"),
        ("consolidated.00.pth", "authors' own format"),
        ("consolidated.safetensors", "authors' own format"),
        ("weights.npz", "MLX"),
    ],
)
def test_weights_in_another_format_alone_are_named(copy: Path, name: str, message: str):
    (copy / name).write_bytes(b"x")
    assert resolve(copy) == copy
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        resolve(copy)


@pytest.mark.parametrize("of_directory", [False, True])
def test_a_pointer_in_place_of_a_gguf_file_is_named(of_directory: bool, tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"model\.gguf is a Git LFS pointer.*git lfs pull"):
        resolve(tmp_path if of_directory else file)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_quantized_weights_are_known_by_files_beside_the_configuration(copy: Path, name: str):
    (copy / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"quantized \({name}\)"):
        resolve(copy)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 3}, "quant_method gptq, bits 3"),
        ("quantization_config", {"quant_method": "eetq", "load_in_8bit": True}, "load_in_8bit True"),
        ("compression_config", {"format": "pack-quantized"}, "format pack-quantized"),
        ("quantization_config", {"unheard": 1}, "has quantization_config: quantized"),
    ],
)
def test_a_quantized_configuration_names_its_method(key: str, value: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        config_from_hf({**GOLDEN.json("config"), key: value})
