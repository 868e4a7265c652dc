"""Shapes of the published models, for benchmarks with random weights."""

from jdllm.models.config import ModelConfig
from jdllm.models.rotary import RopeConfig

SHAPES: dict[str, ModelConfig] = {
    "llada-8b": ModelConfig(
        family="llada",
        vocab_size=126464,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=12288,
        max_positions=4096,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        mask_id=126336,
        eos_id=126081,
        eot_id=126348,
    ),
}


def step_flops(config: ModelConfig, rows: int, head_rows: int) -> float:
    """Floating-point operations of one full step of one segment."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    attention = 2 * rows * rows * q
    return 2.0 * (
        config.num_layers * (rows * layer + attention) + head_rows * config.hidden_size * config.vocab_size
    )
