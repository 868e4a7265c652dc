"""Adapters with which models draft: checkpoints bring them in a directory of their own, in PEFT's format."""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdllm.checkpoints.index import StoredTensor
from jdllm.checkpoints.peft import (
    CONFIG,
    FOLLOWED,
    WEIGHTS,
    check_tensors,
    checked_alpha,
    checked_rank,
    read_settings,
    read_tensors,
)
from jdllm.models.adapter import DraftAdapter
from jdllm.models.config import ModelConfig
from jdllm.models.registry import FAMILIES

_FOLLOWED = FOLLOWED | {
    "target_modules": (["o_proj"], "o_proj"),
    "use_rslora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
}


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
    rank, scale = _configured(directory)
    shapes, index = _shapes(config, rank), read_tensors(directory)
    expected = {_tensor(i, m): shapes[m] for i in range(config.num_layers) for m in shapes}
    check_tensors(directory / WEIGHTS, index, expected)

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
    shapes = _shapes(config, _configured(directory)[0])
    return config.num_layers * sum(map(math.prod, shapes.values())) * jnp.dtype(dtype).itemsize


def _directory(path: Path, config: ModelConfig) -> Path | None:
    """Where a checkpoint has its adapter for drafts; `None` where it has none."""
    name = FAMILIES[config.family].draft_adapter
    return path / name if name is not None and (path / name / CONFIG).is_file() else None


def _shapes(config: ModelConfig, rank: int) -> dict[str, tuple[int, int]]:
    """Of the two matrices of each layer."""
    return {"A": (rank, config.num_heads * config.head_dim), "B": (config.hidden_size, rank)}


def _tensor(layer: int, matrix: str) -> str:
    return f"base_model.model.encoder.layers.{layer}.self_attn.o_proj.lora_{matrix}.weight"


def _configured(directory: Path) -> tuple[int, float]:
    """Rank and scale of an adapter."""
    settings, file = read_settings(directory, _FOLLOWED), directory / CONFIG
    rank = checked_rank(f"{file}: r", settings.get("r"))
    return rank, checked_alpha(f"{file}: lora_alpha", settings.get("lora_alpha")) / rank


def _read(stored: StoredTensor) -> np.ndarray:
    """A tensor in float32."""
    return stored.read(stored.whole).astype(np.float32)
