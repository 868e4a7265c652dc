"""Llama 2 and 3 (3.1 and later with their rotary scaling): causal.

Source: the configuration of the meta-llama checkpoints and LlamaForCausalLM of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.decoder import decoder_config

TURN_END = "<|eot_id|>"


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed Llama `config.json`; `ConfigError` names a key that is missing or unsupported."""
    fields = HfFields(values, "Llama")
    fields.require("attention_bias", (False,))
    return decoder_config(values, fields, family="llama", default_theta=10000.0, attention="causal")
