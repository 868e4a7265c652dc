"""LLaDA 8B (Base, Instruct, 1.5) and its long-context kin: configuration and tensor names.

Source: the configuration and the safetensors index of the GSAI-ML/LLaDA-8B checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import MOST_LAYERS, HfFields, ModelConfig
from jdllm.models.rotary import RopeConfig

MASK_TOKEN = "<|mdm_mask|>"
TURN_END = "<|eot_id|>"

CLASS_DEFAULTS = {
    "activation_type": "swiglu",
    "block_type": "sequential",
    "embedding_size": 50304,
    "layer_norm_type": "default",
    "max_sequence_length": 1024,
    "rope": False,
    "weight_tying": True,
}
"""Of LLaDAConfig: what the published code takes where a key is absent, and the checkpoints state."""

_BLOCK = "model.transformer.blocks.{layer}."

TENSOR_NAMES: dict[str, str] = {
    "embed": "model.transformer.wte.weight",
    "layers/attn_norm": _BLOCK + "attn_norm.weight",
    "layers/q": _BLOCK + "q_proj.weight",
    "layers/k": _BLOCK + "k_proj.weight",
    "layers/v": _BLOCK + "v_proj.weight",
    "layers/o": _BLOCK + "attn_out.weight",
    "layers/ffn_norm": _BLOCK + "ff_norm.weight",
    "layers/gate": _BLOCK + "ff_proj.weight",
    "layers/up": _BLOCK + "up_proj.weight",
    "layers/down": _BLOCK + "ff_out.weight",
    "final_norm": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed LLaDA `config.json`; `ConfigError` names a key that is missing or unsupported.

    `rope_scaling` is an extension: the published code has none, and takes the key for nothing.
    """
    fields = HfFields(values, "LLaDA", CLASS_DEFAULTS)
    fields.check_quantized()
    fields.require("block_type", ("llama",))
    fields.require("layer_norm_type", ("rms",))
    fields.require("activation_type", ("silu",))
    fields.require("rope", (True,))
    fields.require("rope_full_precision", (True,))
    fields.require("layer_norm_with_affine", (True,))
    fields.require("block_group_size", (1,))
    for absent in (
        "alibi",
        "attention_layer_norm",
        "bias_for_layer_norm",
        "include_bias",
        "include_qkv_bias",
        "input_emb_norm",
        "multi_query_attention",
        "scale_logits",
    ):
        fields.require(absent, (False,))
    heads, kv_heads, head_dim = fields.head_layout("n_heads", "n_kv_heads", "d_model")
    hidden = fields.size("d_model")
    return ModelConfig(
        family="llada",
        vocab_size=fields.size("embedding_size", fields.size("vocab_size")),
        hidden_size=hidden,
        num_layers=fields.size("n_layers", most=MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("mlp_hidden_size", fields.size("mlp_ratio", 4) * hidden),
        max_positions=fields.size("max_sequence_length"),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-5),
        rope=RopeConfig.from_hf(values, default_theta=10000.0, partial=False),
        tied_head=fields.get("weight_tying", bool),
        mask_id=fields.token_id("mask_token_id"),
        bos_id=fields.token_id("bos_token_id"),
        eos_id=fields.token_id("eos_token_id"),
        more_eos_ids=fields.token_ids("eos_token_id")[1:],
        eot_id=fields.token_id("eot_token_id"),
        dtype=fields.dtype(),
    )
