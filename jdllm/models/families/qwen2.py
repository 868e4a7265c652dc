"""Qwen2 and Qwen2.5: causal, with biases in the query, key and value projections.

Source: the configuration of the Qwen checkpoints and Qwen2ForCausalLM of transformers.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.families.decoder import causal_config, window_of_qwen

TURN_END = "<|im_end|>"
CLASS_DEFAULTS = {"max_window_layers": 28, "num_key_value_heads": 32, "sliding_window": 4096}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed Qwen2 `config.json`; `ConfigError` names a key that is missing or unsupported."""
    fields = HfFields(values, "Qwen2", CLASS_DEFAULTS)
    return causal_config(
        values,
        fields,
        family="qwen2",
        default_theta=10000.0,
        window=window_of_qwen(fields),
        qkv_bias=True,
    )
