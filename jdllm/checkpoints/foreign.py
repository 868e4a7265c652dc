"""What a path is that is no checkpoint, and what its owner can do: formats that others write or read."""

from pathlib import Path

from jdllm.checkpoints import native
from jdllm.checkpoints.index import FILE_INDEX, SINGLE_FILE, listed
from jdllm.errors import CheckpointError
from jdllm.gguf_files import is_gguf, models_in
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


def checkpoint_at(path: Path) -> Path:
    """The checkpoint at a path that exists: a directory, or the GGUF file that has the weights.

    Raises `CheckpointError` for any other file, for a directory as `check_directory` says, and for one with
    several models in GGUF and no other weights.
    """
    if path.is_dir():
        check_directory(path)
        file = _gguf_in(path)
        if file is None:
            return path
    elif is_gguf(path):
        file = path
    else:
        raise CheckpointError(
            f"{path} is a file: expected a GGUF file or the directory of a checkpoint, such as {path.parent}"
        )
    _check_pointer(file)
    return file


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
        _check_pointer(file)


def _gguf_in(directory: Path) -> Path | None:
    """The GGUF file of a directory that has no other weights."""
    own = (SINGLE_FILE, FILE_INDEX, native.MANIFEST)
    found = [] if any((directory / name).is_file() for name in own) else models_in(directory)
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} holds several GGUF files: give one of {listed([file.name for file in found])}"
        )
    return next(iter(found), None)


def _tells_of_quantised(config: Path) -> bool:
    return config.is_file() and any(read_object(config).get(key) for key in KEYS)


def _check_pointer(file: Path) -> None:
    if is_pointer(file):
        raise CheckpointError(
            f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in {file.parent}, or"
            " download the model from the hub"
        )


def is_pointer(file: Path) -> bool:
    """Whether Git LFS left a pointer in place of a file."""
    with file.open("rb") as opened:
        return opened.read(len(_LFS)) == _LFS


def _read(path: Path) -> list[Path]:
    """The files of a checkpoint that may be read."""
    skipped = {file for pattern in NEVER_READ for file in path.glob(pattern)}
    found = {file for pattern in HUB_FILES for file in path.glob(pattern)}
    return sorted(file for file in found - skipped if file.is_file())
