"""What a directory of PEFT holds: the settings of a LoRA adapter, and its tensors."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jdllm.checkpoints.foreign import check_fetched
from jdllm.checkpoints.index import DTYPES, Index, listed, read_header
from jdllm.errors import CheckpointError
from jdllm.json_files import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

Followed = Mapping[str, tuple[Any, ...]]
"""Keys of the settings that change what an adapter computes, and the values that jdllm follows; the first one
is for messages."""

FOLLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
}
"""Of every adapter."""


def read_settings(directory: Path, followed: Followed) -> dict[str, Any]:
    """Read what an adapter's configuration says.

    Arguments:
    - `directory`: of the adapter.
    - `followed`: keys whose values are compared.

    Raises `CheckpointError` for a directory without an adapter, files that Git LFS has not fetched, a damaged
    configuration, and values that are not followed.
    """
    file = directory / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{directory} holds no adapter: expected a directory of PEFT, with {CONFIG}")
    check_fetched(directory)
    settings = read_object(file)
    for key, values in followed.items():
        if settings.get(key) not in values:
            raise CheckpointError(f"{file}: {key} is {settings.get(key)!r}, expected {values[0]!r}")
    return settings


def checked_rank(told: str, value: Any) -> int:
    """A rank; `CheckpointError` with what is told of it where it is none."""
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{told} is {value!r}, expected a positive integer")
    return value


def checked_alpha(told: str, value: Any) -> float:
    """What a product is multiplied by before the rank divides it; `CheckpointError` for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{told} is {value!r}, expected a number")
    return value


def read_tensors(directory: Path) -> Index:
    """Read which tensors an adapter has, from the header of their file.

    Raises `CheckpointError` for a file that is missing or damaged, and for a pickle.
    """
    if (directory / WEIGHTS).is_file():
        return read_header(directory / WEIGHTS)
    if (directory / _PICKLE).is_file():
        raise CheckpointError(
            f"{directory} has its weights in {_PICKLE}, a pickle of PyTorch, which jdllm does not run: load"
            " the adapter with PEFT, and save it with save_pretrained"
        )
    raise CheckpointError(f"{directory} has {CONFIG} and no {WEIGHTS}")


def check_tensors(file: Path, index: Index, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the tensors of an adapter with those of the model, all at once.

    Arguments:
    - `file`, `index`: the tensors that are there.
    - `expected`: their names and shapes.

    Raises `CheckpointError` that names every missing, unknown and mis-shaped tensor, and every type that
    cannot be loaded.
    """
    kinds = {
        "missing": [name for name in expected if name not in index],
        "unknown": [name for name in index if name not in expected],
        "of another shape": [
            f"{name} is {list(index[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in index and index[name].shape != shape
        ],
        f"of another type than {', '.join(DTYPES)}": [
            f"{name} is {stored.dtype}" for name, stored in index.items() if stored.dtype not in DTYPES
        ],
    }
    problems = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise CheckpointError(f"tensors of {file} do not fit the model: " + "; ".join(problems))
