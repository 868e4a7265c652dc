"""What a path is that is no checkpoint, and what its owner can do: formats that others write or read."""

from pathlib import Path

from jdllm.checkpoints.index import FILE_INDEX, SINGLE_FILE
from jdllm.errors import CheckpointError
from jdllm.json_files import read_object
from jdllm.models.quantization import KEYS

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model")
"""What a checkpoint consists of; nothing else is read or downloaded."""

NEVER_READ = ("consolidated*", "*/*.json", "*/*.safetensors")
"""The same weights in their authors' own format, and what lies in subdirectories."""

_LFS = b"version https://git-lfs.github.com/spec/"
_ADAPTER = "adapter_config.json"
_SAVE_AGAIN = "load the model with transformers, save it with save_pretrained, and open that directory"
_OTHER_WEIGHTS = (
    (
        "*.gguf",
        f"weights in GGUF: open the Hugging Face directory that they were made from, or {_SAVE_AGAIN}",
    ),
    ("pytorch_model*.bin", f"weights as PyTorch's pickles, which jdllm does not run: {_SAVE_AGAIN}"),
    ("consolidated*", "weights in their authors' own format: open the directory in that of Hugging Face"),
    ("*.pth", "weights in their authors' own format: open the directory in that of Hugging Face"),
    ("*.npz", f"weights of MLX or NumPy: {_SAVE_AGAIN}"),
)
_QUANTIZED = {
    "quantize_config.json": "AutoGPTQ",
    "quant_config.json": "AutoAWQ",
    "hf_quant_config.json": "NVIDIA ModelOpt",
}


def check_file(path: Path) -> None:
    """Raise `CheckpointError` for a path that is a file: a checkpoint is a directory."""
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path} holds {_OTHER_WEIGHTS[0][1]}")
    raise CheckpointError(f"{path} is a file: expected the directory of a checkpoint, such as {path.parent}")


def check_directory(path: Path) -> None:
    """Raise `CheckpointError` for a directory that holds something else than a checkpoint's own files.

    That is an adapter, weights in other formats only, quantised weights that `config.json` does not mention,
    and files that Git LFS has not fetched. An empty directory, or one without `config.json`, may pass.
    """
    check_fetched(path)
    if any((path / name).is_file() for name in (SINGLE_FILE, FILE_INDEX)):
        for name, writer in _QUANTIZED.items():
            if (path / name).is_file() and not _tells_of_quantised(path / "config.json"):
                raise CheckpointError(
                    f"{path} holds weights that {writer} has quantized ({name}), and config.json has no"
                    " quantization_config: open the model that they were made from"
                )
        return
    if (path / _ADAPTER).is_file():
        base = read_object(path / _ADAPTER).get("base_model_name_or_path")
        raise CheckpointError(
            f"{path} holds an adapter (PEFT, {_ADAPTER}) of {base}, and no model: open the directory"
            " of that model, and give this one as adapter (`LLM(model, adapter=...)`, `--adapter`)"
        )
    for pattern, what in _OTHER_WEIGHTS:
        if any(path.glob(pattern)):
            raise CheckpointError(f"{path} holds {what}")


def check_fetched(path: Path) -> None:
    """Raise `CheckpointError` for a directory with pointers in place of files that are read."""
    for file in _read(path):
        if is_pointer(file):
            raise CheckpointError(
                f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in {path}, or download"
                " the model from the hub"
            )


def _tells_of_quantised(config: Path) -> bool:
    return config.is_file() and any(read_object(config).get(key) for key in KEYS)


def is_pointer(file: Path) -> bool:
    """Whether Git LFS left a pointer in place of a file."""
    with file.open("rb") as opened:
        return opened.read(len(_LFS)) == _LFS


def _read(path: Path) -> list[Path]:
    """The files of a checkpoint that may be read."""
    skipped = {file for pattern in NEVER_READ for file in path.glob(pattern)}
    found = {file for pattern in HUB_FILES for file in path.glob(pattern)}
    return sorted(file for file in found - skipped if file.is_file())
