"""The keys of published `config.json` files: of small recorded models, and of published sizes."""

from tests.helpers import Golden
from tests.models import qwen3_reference

RECORDED = (
    "dream", "fast_dllm_v2", "llada2", "llada_moe", "llama", "llama31_rope", "mistral", "mistral_swa",
    "nemotron_labs_diffusion", "qwen2", "sdar",
)  # fmt: skip
VALUES = {name: Golden(name).json("config") for name in RECORDED}
VALUES["qwen3"] = qwen3_reference.VALUES
VALUES["sdar_moe"] = qwen3_reference.VALUES | qwen3_reference.SDAR_MOE
DREAM_7B = VALUES["dream"] | {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "mask_token_id": 151666,
    "eos_token_id": 151643,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = VALUES["qwen3"] | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
NEMOTRON_8B = VALUES["nemotron_labs_diffusion"] | {
    "hidden_size": 4096,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 131072,
}
SDAR_8B = VALUES["sdar"] | {key: value for key, value in QWEN3_8B.items() if key != "architectures"}
FAST_DLLM_7B = VALUES["fast_dllm_v2"] | {
    key: DREAM_7B[key]
    for key in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size",
    )
} | {"layer_types": ["full_attention"] * 28}  # fmt: skip
LLADA2_MINI = VALUES["llada2"] | {
    "num_hidden_layers": 20,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "topk_group": 4,
    "vocab_size": 157184,
}
LLADA2_FLASH = LLADA2_MINI | {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "num_attention_heads": 32,
    "moe_intermediate_size": 1024,
}
SDAR_30B = VALUES["sdar_moe"] | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
