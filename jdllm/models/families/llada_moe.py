"""LLaDA-MoE 7B-A1B (Base, Instruct): LLaDA with experts, query and key norms and the names of OLMoE.

Source: configuration_lladamoe.py and modeling_lladamoe.py of the inclusionAI/LLaDA-MoE checkpoints. Their
`config.json` has the model type of LLaDA and no mask id, and `norm_topk_prob` has no effect.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.errors import ConfigError
from jdllm.models.config import MOST_LAYERS, HfFields, ModelConfig, MoeConfig
from jdllm.models.families import decoder

MASK_TOKEN = "<|mask|>"
TURN_END = "<|role_end|>"


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed LLaDA-MoE `config.json`; `ConfigError` names a key that is missing or
    unsupported."""
    fields = HfFields(values, "LLaDA-MoE")
    fields.require("attention_bias", (False,))
    fields.require("clip_qkv", (None,))
    fields.require("moe_router_score_function", ("softmax",))
    fields.require("routed_scaling_factor", (1,))
    fields.require("shared_expert_intermediate_size", (None,))
    for groups in ("router_num_group", "router_topk_group"):
        fields.require(groups, (1,))
    return decoder.decoder_config(
        values,
        fields,
        family="llada_moe",
        default_theta=50000.0,
        partial_rotary=True,
        ffn_key="dense_intermediate_size",
        qk_norm=fields.get("qk_layernorm", bool, False),
        moe=_moe(fields),
    )


def _moe(fields: HfFields) -> MoeConfig | None:
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    has_experts = fields.get("moe_layer_freq", list)
    if len(has_experts) != layers or any(flag not in (0, 1) for flag in has_experts):
        raise ConfigError(
            f"config.json: moe_layer_freq is {has_experts!r}, expected 0 (dense) or 1 (experts)"
            f" for each of the {layers} layers"
        )
    dense = tuple(layer for layer, flag in enumerate(has_experts) if not flag)
    return decoder.experts_config(
        fields,
        dense,
        expert_size=fields.size("expert_intermediate_size"),
        expert_bias=fields.get("moe_router_enable_expert_bias", bool, False),
    )
