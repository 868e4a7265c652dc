"""SDAR 30B-A3B: SDAR with the experts of Qwen3-MoE.

Source: the configuration of the JetLM/SDAR checkpoints, and Qwen3MoeConfig and Qwen3MoeSparseMoeBlock of
transformers.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import MOST_LAYERS, HfFields, ModelConfig, MoeConfig
from jdllm.models.families.decoder import experts_config
from jdllm.models.families.sdar import sdar_config

CLASS_DEFAULTS = {"block_size": 4, "decoder_sparse_step": 1}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed SDAR-MoE `config.json`; `ConfigError` names a key that is missing or unsupported."""
    fields = HfFields(values, "SDAR-MoE", CLASS_DEFAULTS)
    fields.size("num_key_value_heads")  # must be stated
    return sdar_config(values, fields, family="sdar_moe", moe=_moe(fields))


def _moe(fields: HfFields) -> MoeConfig | None:
    """Layers of `mlp_only_layers` are dense, and of all layers but each `decoder_sparse_step`th."""
    layers, step = fields.size("num_hidden_layers", most=MOST_LAYERS), fields.size("decoder_sparse_step")
    dense = fields.get("mlp_only_layers", list, [])
    return experts_config(
        fields,
        tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step),
        expert_size=fields.size("moe_intermediate_size"),
        normalized=fields.get("norm_topk_prob", bool),
    )
