"""Weights in memory as a Hugging Face checkpoint, and what lies beside the weights of any checkpoint."""

import dataclasses
import functools
import json
import math
import operator
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.checkpoints import native
from jdllm.checkpoints.index import DTYPES, FILE_INDEX, SINGLE_FILE, header_name
from jdllm.checkpoints.staging import staged, synced
from jdllm.checkpoints.tokenizer import load_tokenizer
from jdllm.errors import CheckpointError
from jdllm.gguf_files import is_gguf
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf, read_config
from jdllm.models.quantization import KEYS
from jdllm.models.registry import FAMILIES
from jdllm.models.weights import LeafPath, Params, TensorSpec, stored_specs
from jdllm.quantised import WeightForm

_KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
_OF_TEXTS = ("mask_id", "bos_id", "eos_id", "more_eos_ids", "eot_id", "dtype", "token_limit")
"""Fields of a configuration that say nothing of the transformer."""


def save_hf(
    target: Path, config: ModelConfig, params: Params, like: Path, *, dtype: str | None, overwrite: bool
) -> None:
    """Write weights as the directory of a Hugging Face checkpoint.

    The host holds one tensor at a time. The directory appears when it is complete.

    Arguments:
    - `target`: the directory to make.
    - `config`: the model.
    - `params`: its weights.
    - `like`: the directory of a checkpoint of the same model, Hugging Face or native, whose other files are
      copied.
    - `dtype`: "bfloat16", "float16" or "float32"; `None` keeps each weight in its type.
    - `overwrite`: replace a checkpoint at `target`, which may be `like`, at the very end.

    Raises `CheckpointError` for a `target` that exists or cannot be written, for an unknown `dtype`, and for
    a `like` whose configuration is of another model.
    """
    names = [known.name for known in DTYPES.values()]
    if dtype is not None and dtype not in names:
        raise CheckpointError(f"dtype is {dtype!r}, expected one of {', '.join(names)}")
    _check_like(config, like)
    # No run continues another one: the weights may have changed in between.
    job = {"to": "hf", "save": uuid.uuid4().hex}
    with staged(target, job, overwrite=overwrite) as stage:
        write_weights(stage.directory / SINGLE_FILE, config, params, dtype)
        copy_files(like, stage.directory)
        state_plain_weights(stage.directory)
        types = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
        stored = dtype or (types.pop() if len(types) == 1 else None)
        if stored is not None:
            restate_dtype(stage.directory, stored)


def write_weights(path: Path, config: ModelConfig, params: Params, dtype: str | None) -> None:
    """Write all weights to one safetensors file, under their Hugging Face names.

    Arguments:
    - `path`: the file to write.
    - `config`, `params`: the model and its weights.
    - `dtype`: the name of the stored type; `None` keeps each weight in its type.
    """
    stored = [(spec, [_leaf(params, path) for path in paths]) for paths, spec in stored_specs(config).items()]
    with synced(path) as out:
        header = (
            (name, header_name(dtype or leaves[0].dtype.name), spec.source_shape)
            for spec, leaves in stored
            for name, _ in spec.sources()
        )
        out.write(safetensors_header(header, {"format": "pt"}))
        for spec, leaves in stored:
            for tensor in _tensors(spec, leaves, dtype):
                out.write(tensor.data)


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """What a safetensors file begins with.

    Arguments:
    - `tensors`: name, type in the words of the header, and shape, in the order of the data.
    - `metadata`: of the file; may be empty.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def copy_files(source: Path, target: Path) -> None:
    """Copy all but the weights: configuration, tokenizer, chat template, model code, adapter for drafts.

    Of a GGUF file its metadata say the same, or the files beside it.
    """
    if is_gguf(source):
        (target / "config.json").write_text(json.dumps(read_config(source), indent=2) + "\n")
        if (tokenizer := load_tokenizer(source)) is not None:
            tokenizer.save(target)
        return
    for pattern in _KEPT:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in (native.MANIFEST, FILE_INDEX):
                shutil.copyfile(file, target / file.name)
    for name in {family.draft_adapter for family in FAMILIES.values()}:
        if name is not None and (source / name).is_dir():
            shutil.copytree(source / name, target / name, copy_function=shutil.copyfile, dirs_exist_ok=True)


def state_plain_weights(directory: Path) -> None:
    """Take what a configuration says of quantised weights out of it."""
    values = read_config(directory)
    if any(key in values for key in KEYS):
        plain = {key: value for key, value in values.items() if key not in KEYS}
        (directory / "config.json").write_text(json.dumps(plain, indent=2) + "\n")


def state_quantised_weights(directory: Path, form: WeightForm) -> None:
    """Let a configuration say in which form a native checkpoint stores the matrices of layers."""
    values = read_config(directory) | {KEYS[0]: {"quant_method": "jdllm", "format": form}}
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def restate_dtype(directory: Path, dtype: str) -> None:
    """Let a configuration that states the type of the weights state the type that they have."""
    values = read_config(directory)
    key = "dtype" if values.get("dtype") is not None else "torch_dtype"
    if values.get(key) not in (None, dtype):
        path = directory / "config.json"
        path.write_text(json.dumps(values | {key: dtype}, indent=2) + "\n")


def _check_like(config: ModelConfig, like: Path) -> None:
    def only_model(config: ModelConfig) -> dict[str, Any]:
        values = dataclasses.asdict(config)
        return {name: value for name, value in values.items() if name not in _OF_TEXTS}

    ours, theirs = only_model(config), only_model(config_from_hf(like))
    if differing := [name for name in ours if ours[name] != theirs[name]]:
        raise CheckpointError(
            f"{like / 'config.json'} is of another model: it differs in {', '.join(differing)}"
        )


def _leaf(params: Params, path: LeafPath) -> jax.Array:
    return functools.reduce(operator.getitem, path, params)  # pyright: ignore[reportReturnType]


def _tensors(spec: TensorSpec, leaves: list[jax.Array], dtype: str | None) -> Iterator[np.ndarray]:
    """The source tensors of a stored leaf, in order, as bytes; several leaves have rows of each."""
    for _, place in spec.sources():
        rows = [leaf[place] for leaf in leaves]
        tensor = jnp.asarray(rows[0] if len(rows) == 1 else jnp.concatenate(rows), dtype)
        value = np.asarray(tensor.T if spec.transposed else tensor)
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8)
