"""What each family refuses in its `config.json`, and which keys have no effect."""

import pytest

from jdllm.errors import ConfigError
from jdllm.models.hf_config import config_from_hf
from tests.models.published_configs import VALUES

COMMON = [
    ("hidden_size", -64),
    ("hidden_size", None),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 3),
    ("rms_norm_eps", None),
    ("max_position_embeddings", None),
    ("vocab_size", "many"),
    ("vocab_size", 2**31),
    ("num_hidden_layers", 10**30),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", 10**400),
    ("eos_token_id", [1, 10**30]),
    ("quantization_config", {"quant_method": "hqq", "bits": 4}),
    ("hidden_act", "gelu"),
    ("mlp_bias", True),
    ("pretraining_tp", 2),
    ("layer_types", ["full_attention", "linear_attention"]),
    ("layer_types", "full_attention"),
    ("layer_types", ["full_attention"]),
    ("layer_types", []),
    ("rope_scaling", {"rope_type": "spiral", "factor": 2.0}),
]
CAUSAL = [("is_causal", False), ("auto_map", {"AutoModel": "modeling.Own"}), ("partial_rotary_factor", 0.5)]
SDAR = [
    ("attention_bias", True),
    ("use_sliding_window", True),
    ("head_dim", None),
    ("block_size", 0),
    ("block_size", "4"),
    ("partial_rotary_factor", 0.5),
]
OWN = {
    "dream": [
        ("block_size", 32),
        ("partial_rotary_factor", 0.5),
        ("use_sliding_window", True),
        ("intermediate_size", None),
        ("mask_token_id", "<|mask|>"),
    ],
    "fast_dllm_v2": [("partial_rotary_factor", 0.5), ("use_sliding_window", True), ("bd_size", 0)],
    "llada2": [
        ("block_length", 0),
        ("first_k_dense_replace", None),
        ("moe_intermediate_size", None),
        ("moe_router_enable_expert_bias", False),
        ("n_group", 3),
        ("n_group", 16),
        ("norm_head", True),
        ("norm_topk_prob", False),
        ("num_experts", None),
        ("num_experts_per_tok", 17),
        ("num_shared_experts", -1),
        ("partial_rotary_factor", 0),
        ("partial_rotary_factor", 2.0),
        ("routed_scaling_factor", 0),
        ("router_dtype", "bf16"),
        ("score_function", "softmax"),
        ("topk_group", 5),
        ("topk_group", 0),
        ("use_bias", True),
        ("use_qkv_bias", True),
        ("use_rmsnorm", False),
        ("use_sliding_window", True),
    ],
    "llama": [*CAUSAL, ("attention_bias", True), ("sliding_window", 4096)],
    "mistral": [*CAUSAL, ("sliding_window", 0), ("layer_types", ["sliding_attention"] * 2)],
    "qwen2": [*CAUSAL, ("use_sliding_window", 1)],
    "qwen3": [
        *CAUSAL,
        ("use_sliding_window", 1),
        ("attention_bias", True),
        ("head_dim", None),
        ("head_dim", 0),
        ("layer_types", ["sliding_attention"] * 3),
    ],
    "sdar": SDAR,
    "sdar_moe": [
        *SDAR,
        ("num_key_value_heads", None),
        ("moe_intermediate_size", None),
        ("num_experts", None),
        ("num_experts_per_tok", 7),
        ("norm_topk_prob", None),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", 1),
    ],
    "nemotron_labs_diffusion": [
        ("attention_bias", True),
        ("block_size", 0),
        ("dlm_paradigm", "block_diff"),
        ("head_dim", None),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 128),
    ],
    "llada_moe": [
        ("attention_bias", True),
        ("clip_qkv", 8.0),
        ("shared_expert_intermediate_size", 1024),
        ("moe_router_score_function", "sigmoid"),
        ("routed_scaling_factor", 2.5),
        ("router_num_group", 8),
        ("router_topk_group", 4),
        ("moe_layer_freq", None),
        ("moe_layer_freq", [1]),
        ("moe_layer_freq", [1, 2]),
        ("num_experts", 0),
        ("num_experts", 10**30),
        ("num_experts_per_tok", 9),
        ("expert_intermediate_size", None),
        ("dense_intermediate_size", 0),
        ("moe_router_enable_expert_bias", 1),
        ("partial_rotary_factor", -1),
    ],
}


@pytest.mark.parametrize(
    ("name", "key", "value"), [(name, *case) for name, own in OWN.items() for case in COMMON + own]
)
def test_what_cannot_be_run_is_named(name, key, value):
    named, others = key, {}
    if key == "rope_scaling":
        named, others = "rope_type", {"rope_parameters": None}
    with pytest.raises(ConfigError, match=named):
        config_from_hf(VALUES[name] | others | {key: value})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "default", "llama_4_scaling_beta": 0.1}, "needs a positive original_max_position"),
        ({"llama_4_scaling_beta": "much"}, "rope_parameters of config.json: llama_4_scaling_beta is 'much'"),
    ],
)
def test_an_impossible_scale_of_queries_is_named(scaling, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(VALUES["nemotron_labs_diffusion"] | {"rope_parameters": scaling})


def test_a_sliding_window_fits_its_layer_types():
    values = VALUES["mistral_swa"] | {"layer_types": ["sliding_attention"] * 2}
    assert config_from_hf(values).sliding_window == 12
    with pytest.raises(ConfigError, match="layer_types"):
        config_from_hf(values | {"layer_types": ["sliding_attention", "full_attention"]})


@pytest.mark.parametrize("value", [0, -1, True, "5"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_an_impossible_window_of_qwen_is_named(name, value):
    with pytest.raises(ConfigError, match=r"sliding_window is .*expected"):
        config_from_hf(VALUES[name] | {"use_sliding_window": True, "sliding_window": value})


WITHOUT_EFFECT = [
    *((name, "attention_dropout", 0.5) for name in ("dream", "llama", "mistral", "qwen2", "qwen3", "sdar")),
    *((name, "attention_bias", True) for name in ("dream", "fast_dllm_v2", "mistral", "qwen2")),
    *((name, "use_sliding_window", True) for name in ("llama", "mistral")),
    *((name, "sliding_window", 5) for name in ("dream", "fast_dllm_v2", "qwen2", "qwen3", "sdar")),
    *((name, "max_window_layers", 1) for name in ("llama", "mistral_swa", "qwen2", "qwen3")),
]


@pytest.mark.parametrize(("name", "key", "value"), WITHOUT_EFFECT)
def test_keys_that_the_published_code_does_not_use_have_no_effect(name, key, value):
    assert config_from_hf(VALUES[name] | {key: value}) == config_from_hf(VALUES[name])
