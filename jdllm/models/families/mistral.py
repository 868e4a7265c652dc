"""Mistral 7B: causal, with a sliding window in its first version.

Source: the configuration of the mistralai checkpoints and MistralForCausalLM of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.families.decoder import causal_config

CLASS_DEFAULTS = {"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed Mistral `config.json`; `ConfigError` names a key that is missing or unsupported."""
    fields = HfFields(values, "Mistral", CLASS_DEFAULTS)
    return causal_config(
        values,
        fields,
        family="mistral",
        default_theta=10000.0,
        window=fields.size_or_none("sliding_window"),
    )
