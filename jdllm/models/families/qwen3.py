"""Qwen3, the dense models: causal, with norms of queries and keys instead of biases.

Source: the configuration of the Qwen checkpoints and Qwen3ForCausalLM of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.families.decoder import causal_config, window_of_qwen

TURN_END = "<|im_end|>"
CLASS_DEFAULTS = {
    "head_dim": 128,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed Qwen3 `config.json`; `ConfigError` names a key that is missing or unsupported."""
    fields = HfFields(values, "Qwen3", CLASS_DEFAULTS)
    fields.require("attention_bias", (False,))
    fields.size("head_dim")  # refuses null, for which the class has no size
    return causal_config(
        values,
        fields,
        family="qwen3",
        default_theta=10000.0,
        window=window_of_qwen(fields),
        qk_norm=True,
    )
