"""Checkpoints of any shape with random weights, written as a published model would be.

Fast and small in memory: every matrix is a stretch of one pool of random numbers, each from another offset.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jdllm.checkpoints.index import DTYPES
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import TensorSpec, stored_specs

_POOL_ELEMENTS = 4_000_037  # a prime, so that no two tensors begin at the same offset for long


def llada_hf_config(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads as `config`: a LLaDA without rotary scaling."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "rope": True,
        "d_model": config.hidden_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "mlp_hidden_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "embedding_size": config.vocab_size,
        "max_sequence_length": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "weight_tying": config.tied_head,
        "mask_token_id": config.mask_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "eot_token_id": config.eot_id,
        "torch_dtype": dtype,
    }


def dream_hf_config(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads as `config`: a Dream without rotary scaling. The id that
    ends a turn is the tokenizer's to say."""
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_head,
        "use_sliding_window": False,
        "mask_token_id": config.mask_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "torch_dtype": dtype,
    }


def llama_hf_config(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads as `config`: a Llama 3.1, with its rotary scaling."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": {
            "rope_type": config.rope.kind,
            "factor": config.rope.factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": config.rope.original_positions,
        },
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "torch_dtype": dtype,
    }


HF_CONFIGS: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "llada": llada_hf_config,
    "dream": dream_hf_config,
    "llama": llama_hf_config,
}
"""What writes the `config.json` of a family."""


def write_random_checkpoint(
    directory: str | Path, hf_config: Mapping[str, Any], *, shard_bytes: int = 5_000_000_000, seed: int = 0
) -> Path:
    """Write `config.json` and safetensors files with random weights of the configured type.

    Arguments:
    - `directory`: created; must not exist. Written under a temporary name and renamed when complete.
    - `hf_config`: the parsed `config.json`; weights have its `torch_dtype` (bfloat16 if absent).
    - `shard_bytes`: data bytes in a file at most (one tensor at least); a single file has no index.
    - `seed`: of the numbers: normal with the spec tree's deviation for matrices, one for norms.

    Returns `directory`.
    """
    directory = Path(directory)
    config = config_from_hf(hf_config)
    stored = next(name for name, dtype in DTYPES.items() if dtype.name == (config.dtype or "bfloat16"))
    specs = [(name, spec) for spec in stored_specs(config).values() for name, _ in spec.sources()]
    shards = _shards(specs, DTYPES[stored].itemsize, shard_bytes)
    pool = np.random.default_rng(seed).standard_normal(_POOL_ELEMENTS, np.float32)

    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
            weight_map = {t: file for file, shard in zip(names, shards, strict=True) for t, _ in shard}
            index = {"metadata": {}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        offset = 0
        for name, shard in zip(names, shards, strict=True):
            offset = _write_shard(partial / name, shard, stored, pool, offset)
        (partial / "config.json").write_text(json.dumps(dict(hf_config), indent=1))
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


Shard = list[tuple[str, TensorSpec]]


def _shards(specs: Shard, itemsize: int, limit: int) -> list[Shard]:
    shards: list[Shard] = [[]]
    size = 0
    for name, spec in specs:
        tensor = math.prod(spec.source_shape) * itemsize
        if shards[-1] and size + tensor > limit:
            shards.append([])
            size = 0
        shards[-1].append((name, spec))
        size += tensor
    return shards


def _write_shard(path: Path, shard: Shard, stored: str, pool: np.ndarray, offset: int) -> int:
    header, end = {}, 0
    for name, spec in shard:
        start, end = end, end + math.prod(spec.source_shape) * DTYPES[stored].itemsize
        header[name] = {"dtype": stored, "shape": spec.source_shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pools = {std: (pool * std).astype(DTYPES[stored]) for std in {spec.init_std for _, spec in shard} - {0.0}}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, spec in shard:
            count = math.prod(spec.source_shape)
            if spec.init_std == 0.0:
                file.write(np.ones(count, DTYPES[stored]).tobytes())
            else:
                _write_from_pool(file, pools[spec.init_std], offset, count)
                offset = (offset + count + 1) % _POOL_ELEMENTS
    return offset


def _write_from_pool(file: BinaryIO, pool: np.ndarray, offset: int, count: int) -> None:
    while count:
        part = pool[offset : offset + count]
        file.write(part.view(np.uint8))
        count -= len(part)
        offset = 0
