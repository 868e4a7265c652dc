"""The benchmarks' models in miniature."""

import dataclasses

from benchmarks.shapes import SHAPES
from jdllm.models.config import ModelConfig, MoeConfig

MASK_ID = 90

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "mask_id": MASK_ID,
    "eos_id": 89,
}


def small(shape: str) -> ModelConfig:
    """`SHAPES[shape]` with small sizes; whether heads are grouped, and the features, stay."""
    config = SHAPES[shape]
    moe = config.moe and MoeConfig(experts=4, top_k=2, expert_size=16)
    kv_heads = 4 if config.num_kv_heads == config.num_heads else 2
    return dataclasses.replace(config, **_SIZES, num_kv_heads=kv_heads, moe=moe, eot_id=None)
