"""Adapters that checkpoints bring in a directory of their own, in the format of PEFT."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdllm.checkpoints.index import DTYPES, Index, StoredTensor, listed, read_header
from jdllm.errors import CheckpointError
from jdllm.json_files import read_object
from jdllm.models.adapter import DraftAdapter
from jdllm.models.config import ModelConfig
from jdllm.models.registry import FAMILIES

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FOLLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "target_modules": (["o_proj"], "o_proj"),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
}
"""Keys of the configuration that change what an adapter computes, and the values that jdllm follows."""


def load_adapter(path: Path, config: ModelConfig, dtype: str, *, load_weights: bool) -> DraftAdapter | None:
    """The adapter with which a model drafts, on the default device; `None` where the checkpoint has none.

    Arguments:
    - `path`: the directory of the checkpoint.
    - `config`: the model.
    - `dtype`: of the weights on the device. The scale of the adapter is multiplied in before the cast.
    - `load_weights`: `False` leaves the weights zero.

    Raises `CheckpointError` for a configuration that is not followed, and for tensors that are missing,
    unknown, of another shape, or of a type that cannot be loaded.
    """
    directory = _directory(path, config)
    if directory is None:
        return None
    file = directory / _WEIGHTS
    rank, scale = _configured(directory / _CONFIG)
    if not file.is_file():
        raise CheckpointError(f"{directory} has {_CONFIG} and no {_WEIGHTS}")
    shapes = _shapes(config, rank)
    index = _checked(file, {_tensor(i, m): shapes[m] for i in range(config.num_layers) for m in shapes})

    def stacked(matrix: str, factor: float) -> Any:
        if not load_weights:
            return jnp.zeros((config.num_layers, *shapes[matrix]), dtype)
        read = [
            _read(index[_tensor(layer, matrix)]) * np.float32(factor) for layer in range(config.num_layers)
        ]
        return jnp.asarray(np.stack(read), dtype)

    return DraftAdapter(stacked("A", 1), stacked("B", scale))


def adapter_bytes(path: Path, config: ModelConfig, dtype: str) -> int:
    """Bytes on the device of the adapter that `load_adapter` would load; 0 where the checkpoint has none.

    Arguments:
    - `path`, `dtype`: of `load_adapter`. No weights are read.
    - `config`: the model; on several cards the part of each (`ModelConfig.on_card`).

    Raises `CheckpointError` for a configuration that is not followed.
    """
    directory = _directory(path, config)
    if directory is None:
        return 0
    shapes = _shapes(config, _configured(directory / _CONFIG)[0])
    return config.num_layers * sum(map(math.prod, shapes.values())) * jnp.dtype(dtype).itemsize


def _directory(path: Path, config: ModelConfig) -> Path | None:
    """Where a checkpoint has its adapter for drafts; `None` where it has none."""
    name = FAMILIES[config.family].draft_adapter
    return path / name if name is not None and (path / name / _CONFIG).is_file() else None


def _shapes(config: ModelConfig, rank: int) -> dict[str, tuple[int, int]]:
    """Of the two matrices of each layer."""
    return {"A": (rank, config.num_heads * config.head_dim), "B": (config.hidden_size, rank)}


def _tensor(layer: int, matrix: str) -> str:
    return f"base_model.model.encoder.layers.{layer}.self_attn.o_proj.lora_{matrix}.weight"


def _configured(file: Path) -> tuple[int, float]:
    """Rank and scale of an adapter."""
    values = read_object(file)
    for key, followed in _FOLLOWED.items():
        if values.get(key) not in followed:
            raise CheckpointError(f"{file}: {key} is {values.get(key)!r}, expected {followed[0]!r}")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise CheckpointError(f"{file}: r is {rank!r}, expected a positive integer")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise CheckpointError(f"{file}: lora_alpha is {alpha!r}, expected a number")
    return rank, alpha / rank


def _checked(file: Path, expected: Mapping[str, tuple[int, ...]]) -> Index:
    """The tensors of a file, which are those that are expected."""
    index = read_header(file)
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
    return index


def _read(stored: StoredTensor) -> np.ndarray:
    """A tensor in float32."""
    return stored.read(stored.whole).astype(np.float32)
