"""Dream 7B (Base, Instruct), Dream-Coder and DiffuCoder: Qwen2 seeing both ways, with shifted logits.

Source: configuration_dream.py and modeling_dream.py of the Dream-org/Dream-v0 checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.families.decoder import decoder_config

MASK_TOKEN = "<|mask|>"
TURN_END = "<|im_end|>"
CLASS_DEFAULTS = {"num_key_value_heads": 32}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed Dream `config.json`; `ConfigError` names a key that is missing or unsupported."""
    fields = HfFields(values, "Dream", CLASS_DEFAULTS)
    fields.require("use_sliding_window", (False,))
    fields.refuse("block_size", "jdllm does not run Dream with blocks, such as DreamReasoner")
    return decoder_config(values, fields, family="dream", default_theta=1e4, qkv_bias=True, logits_shift=True)
