"""Mistral 7B: causal, with a sliding window in its first version.

Source: the configuration of the mistralai checkpoints and MistralForCausalLM of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.decoder import decoder_config


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed Mistral `config.json`; `ConfigError` names a key that is missing or unsupported."""
    fields = HfFields(values, "Mistral")
    window = None if values.get("sliding_window") is None else fields.size("sliding_window")
    return decoder_config(
        values,
        fields,
        family="mistral",
        default_theta=10000.0,
        layer_type="full_attention" if window is None else "sliding_attention",
        attention="causal",
        sliding_window=window,
    )
