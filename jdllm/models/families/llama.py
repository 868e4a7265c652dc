"""Llama 2 and 3 (3.1 and later with their rotary scaling): causal.

Source: the configuration of the meta-llama checkpoints and LlamaForCausalLM of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.families.decoder import causal_config

TURN_END = "<|eot_id|>"
CLASS_DEFAULTS = {"eos_token_id": 2}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed Llama `config.json`; `ConfigError` names a key that is missing or unsupported."""
    fields = HfFields(values, "Llama", CLASS_DEFAULTS)
    fields.require("attention_bias", (False,))
    fields.require("sliding_window", (None,))
    return causal_config(values, fields, family="llama", default_theta=10000.0)
