"""Shapes of the published models, for benchmarks with random weights."""

from jdllm.models.config import ModelConfig, MoeConfig
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
    "dream-7b": ModelConfig(
        family="dream",
        vocab_size=152064,
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
        max_positions=131072,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        qkv_bias=True,
        logits_shift=True,
        mask_id=151666,
        eos_id=151643,
        eot_id=151645,
    ),
    "llada-moe-7b": ModelConfig(
        family="llada_moe",
        vocab_size=157184,
        hidden_size=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        intermediate_size=8192,
        max_positions=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=50000.0),
        qk_norm=True,
        moe=MoeConfig(experts=64, top_k=8, expert_size=1024),
        mask_id=156895,
        eos_id=156892,
    ),
}


def step_flops(config: ModelConfig, rows: int, head_rows: int) -> float:
    """Floating-point operations of one full step of one segment that sees itself whole."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = config.num_layers * config.intermediate_size
    if config.moe is not None:
        sparse = config.num_layers - len(config.moe.dense_layers)
        per_row = config.moe.top_k * config.moe.expert_size + config.moe.experts / 3
        widths = sparse * per_row + len(config.moe.dense_layers) * config.intermediate_size
    projections = config.hidden_size * (config.num_layers * (2 * q + 2 * kv) + 3 * widths)
    attention = config.num_layers * 2 * rows * rows * q
    return 2.0 * (rows * projections + attention + head_rows * config.hidden_size * config.vocab_size)
