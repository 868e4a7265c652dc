"""SDAR and TraDo, the dense models: Qwen3 whose rows see the block they are in, and unshifted logits.

Source: the configuration and modeling_sdar.py of the JetLM/SDAR checkpoints. Those of I-DLM have the same
architecture and keys and are causal: nothing in their `config.json` tells them apart.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.families.decoder import decoder_config

MASK_TOKEN = "<|MASK|>"
TURN_END = "<|im_end|>"
CLASS_DEFAULTS = {"block_size": 4, "head_dim": 128, "num_key_value_heads": 32}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed SDAR `config.json`; `ConfigError` names a key that is missing or unsupported."""
    return sdar_config(values, HfFields(values, "SDAR", CLASS_DEFAULTS), family="sdar")


def sdar_config(values: Mapping[str, Any], fields: HfFields, **differences: Any) -> ModelConfig:
    """What the dense models and those with experts have in common.

    Arguments:
    - `values`, `fields`: the parsed `config.json`, and typed access to it.
    - `differences`: fields of `ModelConfig` that the family sets itself.
    """
    fields.require("attention_bias", (False,))
    fields.require("use_sliding_window", (False,))
    fields.size("head_dim")  # refuses null, for which the class has no size
    return decoder_config(
        values,
        fields,
        default_theta=10000.0,
        qk_norm=True,
        attention="block_causal",
        block_length=fields.size("block_size"),
        **differences,
    )
