"""Writes GGUF files of small checkpoints, as llama.cpp's converters do.

Sources: the converters of llama.cpp (`LlamaModel`, `LLaDAModel`, `LLaDAMoEModel`, `DreamModel`),
and the names of tensors in `gguf.tensor_mapping`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "LLaDAModelLM": gguf.MODEL_ARCH.LLADA,
    "LLaDAMoEModelLM": gguf.MODEL_ARCH.LLADA_MOE,
    "DreamModel": gguf.MODEL_ARCH.DREAM,
}
_PAIRED = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.LLADA)
_DIFFUSION = (gguf.MODEL_ARCH.LLADA, gguf.MODEL_ARCH.LLADA_MOE, gguf.MODEL_ARCH.DREAM)


def write_gguf(
    source: Path,
    target: Path,
    kinds: Mapping[str, Kind] | Kind = Kind.F32,
    *,
    values: Mapping[str, Any] | None = None,
    raw: Mapping[str, tuple[np.ndarray, Kind]] | None = None,
    **writing: Any,
) -> None:
    """Write a checkpoint as a GGUF file.

    Arguments:
    - `source`: the directory of a checkpoint in float32, with one file.
    - `target`: the file.
    - `kinds`: of the matrices, by the ends of their names in the file; others are in f32.
    - `values`: metadata beside those of the configuration: a string, number or list for each key.
    - `raw`: what is stored under a name in the file, whatever the checkpoint has there.
    - `writing`: options of `gguf.GGUFWriter`.
    """
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch], **writing)
    _add_sizes(writer, config, arch)
    for key, value in (values or {}).items():
        writer.kv_data[0].pop(key, None)
        _add(writer, key, value)
    for name, (value, kind) in (raw or {}).items():
        writer.add_tensor(name, value, raw_dtype=kind)
    for name, value in _named(load_file(source / "model.safetensors"), config, arch).items():
        if name in (raw or {}):
            continue
        kind = kinds if isinstance(kinds, Kind) else _kind_of(name, kinds)
        kind = kind if value.ndim > 1 else Kind.F32
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any], arch: gguf.MODEL_ARCH) -> None:
    def first(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    heads = first("num_attention_heads", "n_heads")
    writer.add_context_length(first("max_position_embeddings", "max_sequence_length"))
    writer.add_embedding_length(first("hidden_size", "d_model"))
    writer.add_block_count(first("num_hidden_layers", "n_layers"))
    if width := first("intermediate_size", "mlp_hidden_size"):
        writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(first("num_key_value_heads", "n_kv_heads"))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_rope_dimension_count(config.get("head_dim") or first("hidden_size", "d_model") // heads)
    writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["expert_intermediate_size"])
    if arch in _DIFFUSION:
        writer.add_causal_attention(False)
        if arch != gguf.MODEL_ARCH.DREAM:
            writer.add_diffusion_shift_logits(False)
    for name in ("bos", "eos", "eot", "mask"):
        if isinstance(config.get(f"{name}_token_id"), int):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", config[f"{name}_token_id"])


def _named(
    tensors: dict[str, np.ndarray], config: Mapping[str, Any], arch: gguf.MODEL_ARCH
) -> dict[str, np.ndarray]:
    layers = config.get("num_hidden_layers") or config["n_layers"]
    heads = config.get("num_attention_heads") or config["n_heads"]
    kv_heads = config.get("num_key_value_heads") or config["n_kv_heads"]
    for layer in range(layers if "num_experts" in config else 0):
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{{}}.{part}.weight"
            each = [tensors.pop(name.format(i)) for i in range(config["num_experts"])]
            tensors[name.replace("{}.", "")] = np.stack(each)
    names = gguf.get_tensor_name_map(arch, layers)
    found = {}
    for name, value in tensors.items():
        if arch in _PAIRED and name.endswith(("q_proj.weight", "k_proj.weight")):
            of = heads if name.endswith("q_proj.weight") else kv_heads
            value = value.reshape(of, 2, len(value) // of // 2, -1).swapaxes(1, 2).reshape(value.shape)
        base, _, end = name.rpartition(".")
        found[f"{names.get_name(base)}.{end}"] = np.ascontiguousarray(value)
    return found


def _kind_of(name: str, kinds: Mapping[str, Kind]) -> Kind:
    return next((kind for end, kind in kinds.items() if name.endswith(end)), Kind.F32)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
