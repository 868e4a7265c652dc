"""LLaDA2.0 and 2.1 (mini, flash): experts in groups, one tensor for queries, keys and values, and blocks.

Source: configuration_llada2_moe.py and modeling_llada2_moe.py of the inclusionAI/LLaDA2 checkpoints. Their
`config.json` states neither the length of a block nor the mask.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.errors import ConfigError
from jdllm.models.config import MOST_EXPERTS, MOST_LAYERS, HfFields, ModelConfig, MoeConfig
from jdllm.models.families import decoder

MASK_TOKEN = "<|mask|>"
TURN_END = "<|role_end|>"
BLOCK_LENGTH = 32
"""Of the published samplers, which all checkpoints are trained for."""

CLASS_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_group": 8,
    "num_shared_experts": 0,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "use_bias": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
}

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "attention."
_SHARED = _LAYER + "mlp.shared_experts."

TENSOR_NAMES: dict[str, str] = decoder.EXPERT_NAMES | {
    "embed": "model.word_embeddings.weight",
    "layers/q": _ATTENTION + "query_key_value.weight",
    "layers/k": _ATTENTION + "query_key_value.weight",
    "layers/v": _ATTENTION + "query_key_value.weight",
    "layers/q_norm": _ATTENTION + "query_layernorm.weight",
    "layers/k_norm": _ATTENTION + "key_layernorm.weight",
    "layers/o": _ATTENTION + "dense.weight",
    "layers/expert_bias": _LAYER + "mlp.gate.expert_bias",
    "layers/shared_gate": _SHARED + "gate_proj.weight",
    "layers/shared_up": _SHARED + "up_proj.weight",
    "layers/shared_down": _SHARED + "down_proj.weight",
}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed LLaDA2 `config.json`; `ConfigError` names a key that is missing or unsupported.

    `block_length` is an extension: the published code takes it as an argument of its sampler.
    """
    fields = HfFields(values, "LLaDA2", CLASS_DEFAULTS)
    for absent in ("norm_head", "use_bias", "use_qkv_bias", "use_sliding_window"):
        fields.require(absent, (False,))
    for present in ("moe_router_enable_expert_bias", "norm_topk_prob", "use_rmsnorm"):
        fields.require(present, (True,))
    fields.require("score_function", ("sigmoid",))
    fields.require("router_dtype", ("fp32",))
    return decoder.decoder_config(
        {**values, "partial_rotary_factor": fields.positive("partial_rotary_factor")},
        fields,
        family="llada2",
        default_theta=10000.0,
        partial_rotary=True,
        qk_norm=fields.get("use_qk_norm", bool),
        attention="block_causal",
        block_length=fields.size("block_length", BLOCK_LENGTH),
        moe=_moe(fields),
    )


def _moe(fields: HfFields) -> MoeConfig | None:
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    dense = fields.get("first_k_dense_replace", int)
    width, shared = fields.size("moe_intermediate_size"), fields.get("num_shared_experts", int, 0)
    if not 0 <= shared <= MOST_EXPERTS:
        raise ConfigError(f"config.json: num_shared_experts is {shared}, expected 0 to {MOST_EXPERTS}")
    moe = decoder.experts_config(
        fields,
        tuple(range(min(dense, layers))),
        expert_size=width,
        expert_bias=True,
        score="sigmoid",
        bias_weighs=False,
        groups=fields.size("n_group"),
        kept_groups=fields.size("topk_group"),
        normalized=fields.size("num_experts_per_tok") > 1,
        scale=fields.positive("routed_scaling_factor"),
        shared_size=shared * width,
    )
    return moe and _with_even_groups(moe)


def _with_even_groups(moe: MoeConfig) -> MoeConfig:
    """The experts, once their groups are known to be possible: each has a sum of two scores."""
    size, rest = divmod(moe.experts, moe.groups)
    if rest or (size < 2 and moe.groups > 1):
        raise ConfigError(
            f"config.json: n_group is {moe.groups}, which does not cut num_experts {moe.experts} into equal"
            " groups of at least 2"
        )
    if moe.kept_groups > moe.groups or moe.top_k > moe.kept_groups * size:
        raise ConfigError(
            f"config.json: topk_group is {moe.kept_groups}, expected at most n_group {moe.groups} and enough"
            f" groups of {size} for num_experts_per_tok {moe.top_k}"
        )
    return moe
