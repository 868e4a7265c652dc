"""Nemotron-Labs-Diffusion (8B): Ministral 3, whose finished rows are causal and whose blocks are filled both
ways.

Source: the configuration and modeling_nemotron_labs_diffusion.py of the nvidia/Nemotron-Labs-Diffusion
checkpoints, and Ministral3Attention of transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.families import decoder

CLASS_DEFAULTS = {
    "block_size": 32,
    "bos_token_id": 1,
    "dlm_paradigm": "bidirectional",
    "eos_token_id": 2,
    "head_dim": 128,
    "num_key_value_heads": 8,
}

TENSOR_NAMES: dict[str, str] = {
    leaf: name.replace("model.", "encoder.", 1) for leaf, name in decoder.TENSOR_NAMES.items()
} | {"head": "diffusion_head.weight"}

IGNORED = (".k_scale", ".v_scale")
"""Scales of caches in 8 bits."""

DRAFT_ADAPTER = "linear_spec_lora"
"""The directory of the adapter with which the published self-speculation drafts."""


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed Nemotron-Labs-Diffusion `config.json`; `ConfigError` names a key that is missing or
    unsupported."""
    fields = HfFields(values, "Nemotron-Labs-Diffusion", CLASS_DEFAULTS)
    fields.require("attention_bias", (False,))
    fields.require("dlm_paradigm", ("bidirectional",))
    fields.require("sliding_window", (None,))
    fields.size("head_dim")  # refuses null, for which the class has no size
    config = decoder.decoder_config(
        values,
        fields,
        family="nemotron_labs_diffusion",
        default_theta=1e6,
        attention="block_causal",
        block_length=fields.size("block_size"),
        causal_context=True,
    )
    given = next((key for key in ("rope_parameters", "rope_scaling") if values.get(key)), None)
    scaling = HfFields(values[given] if given else {}, config.family, file=f"{given} of config.json")
    beta = scaling.get("llama_4_scaling_beta", float, 0.0)
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, query_beta=beta))
