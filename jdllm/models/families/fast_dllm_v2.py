"""Fast-dLLM v2 (1.5B, 7B): Qwen2.5 whose rows see the block they are in, with shifted logits.

Its small blocks are a setting of the sampler, which no file states. Source: the configuration and modeling.py
of the Efficient-Large-Model/Fast_dLLM_v2 checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from jdllm.models.config import HfFields, ModelConfig
from jdllm.models.families.decoder import decoder_config

MASK_TOKEN = "|<MASK>|"
TURN_END = "<|im_end|>"
CLASS_DEFAULTS = {"bd_size": 32, "num_key_value_heads": 32}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed Fast-dLLM v2 `config.json`; `ConfigError` names a key that is missing or
    unsupported."""
    fields = HfFields(values, "Fast-dLLM v2", CLASS_DEFAULTS)
    fields.require("use_sliding_window", (False,))
    return decoder_config(
        values,
        fields,
        family="fast_dllm_v2",
        default_theta=10000.0,
        qkv_bias=True,
        logits_shift=True,
        attention="block_causal",
        block_length=fields.size("bd_size"),
    )
