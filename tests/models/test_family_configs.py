"""What each family reads from its `config.json`, and what it refuses."""

import dataclasses

import pytest

from benchmarks.shapes import SHAPES
from jdllm.errors import ConfigError
from jdllm.models.config import ModelConfig, MoeConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.rotary import RopeConfig
from jdllm.models.weights import param_bytes
from tests.helpers import Golden
from tests.models import qwen3_reference

RECORDED = (
    "dream", "fast_dllm_v2", "llada_moe", "llama", "llama31_rope", "mistral", "mistral_swa", "qwen2", "sdar",
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


def test_dream_is_translated():
    assert config_from_hf(VALUES["dream"]) == ModelConfig(
        family="dream",
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=160,
        max_positions=131072,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qkv_bias=True,
        logits_shift=True,
        mask_id=509,
        bos_id=500,
        eos_id=500,
        dtype="float32",
    )


def test_an_absent_key_of_dream_is_what_its_class_takes():
    absent = ("rope_theta", "num_key_value_heads", "tie_word_embeddings")
    values = {key: value for key, value in VALUES["dream"].items() if key not in absent}
    config = config_from_hf(values | {"num_attention_heads": 32, "hidden_size": 512})
    assert (config.rope.theta, config.num_kv_heads, config.tied_head) == (10000.0, 32, False)


def test_llada_moe_is_translated():
    assert config_from_hf(VALUES["llada_moe"]) == ModelConfig(
        family="llada_moe",
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=160,
        max_positions=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(50000.0),
        qk_norm=True,
        moe=MoeConfig(experts=8, top_k=2, expert_size=28),
        mask_id=511,
        eos_id=508,
        dtype="float32",
    )


def test_qwen3_is_translated():
    assert config_from_hf(VALUES["qwen3"]) == ModelConfig(
        family="qwen3",
        vocab_size=96,
        hidden_size=40,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=56,
        max_positions=40960,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qk_norm=True,
        attention="causal",
        bos_id=1,
        eos_id=90,
        dtype="float32",
    )


def test_sdar_is_translated():
    assert config_from_hf(VALUES["sdar"]) == ModelConfig(
        family="sdar",
        vocab_size=320,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_positions=32768,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qk_norm=True,
        attention="block_causal",
        block_length=4,
        mask_id=317,
        bos_id=310,
        eos_id=310,
        dtype="float32",
    )


def test_fast_dllm_v2_is_translated():
    assert config_from_hf(VALUES["fast_dllm_v2"]) == ModelConfig(
        family="fast_dllm_v2",
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=160,
        max_positions=32768,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        qkv_bias=True,
        attention="block_causal",
        block_length=8,
        logits_shift=True,
        bos_id=498,
        eos_id=500,
        dtype="float32",
    )


def test_an_absent_key_of_fast_dllm_v2_is_what_its_class_takes():
    absent = ("bd_size", "num_key_value_heads", "rope_theta")
    values = {key: value for key, value in VALUES["fast_dllm_v2"].items() if key not in absent}
    config = config_from_hf(values | {"num_attention_heads": 32, "hidden_size": 512})
    assert (config.block_length, config.num_kv_heads, config.rope.theta) == (32, 32, 10000.0)


@pytest.mark.parametrize("name", ["sdar", "sdar_moe"])
def test_blocks_of_sdar_have_four_tokens_unless_stated(name):
    values = {key: value for key, value in VALUES[name].items() if key != "block_size"}
    assert config_from_hf(values).block_length == 4
    assert config_from_hf(values | {"block_size": 16}).block_length == 16


def test_the_experts_of_sdar_are_read():
    moe = MoeConfig(experts=6, top_k=2, expert_size=24, dense_layers=(1,), normalized=True)
    assert config_from_hf(VALUES["sdar_moe"]).moe == moe
    sparse = VALUES["sdar_moe"] | {"decoder_sparse_step": 3, "mlp_only_layers": []}
    assert config_from_hf(sparse).moe == dataclasses.replace(moe, dense_layers=(0, 1))
    assert config_from_hf(VALUES["sdar_moe"] | {"mlp_only_layers": [0, 1, 2]}).moe is None


def test_the_families_differ_where_they_should():
    configs = {name: config_from_hf(values) for name, values in VALUES.items()}
    causal = {name for name, config in configs.items() if config.attention == "causal"}
    assert causal == {"llama", "llama31_rope", "mistral", "mistral_swa", "qwen2", "qwen3"}
    assert {name for name, config in configs.items() if config.qkv_bias} == {
        "dream", "fast_dllm_v2", "qwen2",
    }  # fmt: skip
    assert {name for name, config in configs.items() if config.qk_norm} == {
        "llada_moe", "qwen3", "sdar", "sdar_moe",
    }  # fmt: skip
    assert {name for name, config in configs.items() if config.tied_head} == {"llama31_rope", "qwen2"}
    assert {name: c.sliding_window for name, c in configs.items() if c.sliding_window} == {"mistral_swa": 12}
    assert {name for name, config in configs.items() if config.logits_shift} == {"dream", "fast_dllm_v2"}
    assert configs["llama31_rope"].rope.kind == "llama3"
    assert all(config.mask_id is None for name, config in configs.items() if name in causal)


def test_dream_7b_has_the_published_bytes():
    config = config_from_hf(DREAM_7B)
    assert param_bytes(config, "bfloat16") == 15_231_233_024


@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        (QWEN3_8B, 8_190_735_360),
        (
            QWEN3_8B
            | {
                "hidden_size": 1024,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "intermediate_size": 3072,
                "max_window_layers": 28,
                "tie_word_embeddings": True,
            },
            596_049_920,
        ),
    ],
    ids=["8B", "0.6B"],
)
def test_qwen3_has_the_published_bytes(values, parameters):
    assert param_bytes(config_from_hf(values), "bfloat16") == 2 * parameters


SDAR_8B = VALUES["sdar"] | {key: value for key, value in QWEN3_8B.items() if key != "architectures"}
FAST_DLLM_7B = VALUES["fast_dllm_v2"] | {
    key: DREAM_7B[key]
    for key in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size",
    )
} | {"layer_types": ["full_attention"] * 28}  # fmt: skip
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


@pytest.mark.parametrize(
    ("values", "parameters"),
    [(SDAR_8B, 8_190_735_360), (SDAR_30B, 30_532_122_624), (FAST_DLLM_7B, 7_615_616_512)],
    ids=["SDAR-8B", "SDAR-30B-A3B", "Fast-dLLM-v2-7B"],
)
def test_block_models_have_the_published_bytes(values, parameters):
    assert param_bytes(config_from_hf(values), "bfloat16") == 2 * parameters


def test_bytes_of_a_mixture_include_all_experts():
    config = SHAPES["llada-moe-7b"]
    expert = 3 * 2048 * 1024
    attention = 4 * 2048 * 2048 + 2 * 128 + 2 * 2048
    elements = 16 * (64 * expert + 64 * 2048 + attention) + 2 * 157184 * 2048 + 2048
    assert param_bytes(config, "bfloat16") == 2 * elements


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "linear", "factor": 2.0}, 262144),
        ({"rope_type": "ntk", "factor": 2.0}, 262144),
    ],
)
@pytest.mark.parametrize("name", ["dream", "qwen2", "qwen3"])
def test_scaled_contexts(name, scaling, context):
    values = VALUES[name] | {"rope_scaling": scaling, "max_position_embeddings": 131072}
    config = config_from_hf(values)
    assert config.rope.theta == 1e6
    assert config.rope.kind == (scaling.get("rope_type") or scaling["type"])
    assert config.rope.effective_context(config.max_positions) == context


def test_an_absent_mask_id_stays_absent():
    values = {key: value for key, value in VALUES["llada_moe"].items() if key != "mask_token_id"}
    assert config_from_hf(values).mask_id is None
    assert config_from_hf(values | {"mask_token_id": 156895}).mask_id == 156895


def test_norm_topk_prob_has_no_effect():
    assert config_from_hf(VALUES["llada_moe"] | {"norm_topk_prob": True}) == config_from_hf(
        VALUES["llada_moe"]
    )


def test_layers_without_experts_and_the_bias_are_read():
    values = VALUES["llada_moe"] | {"moe_layer_freq": [0, 1], "moe_router_enable_expert_bias": True}
    moe = config_from_hf(values).moe
    assert moe == MoeConfig(experts=8, top_k=2, expert_size=28, expert_bias=True, dense_layers=(0,))
    assert config_from_hf(VALUES["llada_moe"] | {"moe_layer_freq": [0, 0]}).moe is None


@pytest.mark.parametrize(
    ("architectures", "model_type", "family"),
    [
        (["LLaDAMoEModelLM"], "llada", "llada_moe"),
        (["LLaDAMoEModel"], None, "llada_moe"),
        (None, "lladamoe", "llada_moe"),
        (["Unknown", "DreamModel"], "Dream", "dream"),
        ([], "Dream", "dream"),
        (None, "llama", "llama"),
        (None, "mistral", "mistral"),
        (None, "qwen2", "qwen2"),
        (["Qwen3ForCausalLM"], None, "qwen3"),
        (None, "qwen3", "qwen3"),
        (["Fast_dLLM_QwenForCausalLM"], None, "fast_dllm_v2"),
        (None, "Fast_dLLM_Qwen", "fast_dllm_v2"),
        (["SDARForCausalLM"], None, "sdar"),
        (None, "sdar", "sdar"),
        (None, "sdar_moe", "sdar_moe"),
    ],
)
def test_the_architecture_decides_before_the_model_type(architectures, model_type, family):
    names = {"architectures": architectures, "model_type": model_type}
    assert config_from_hf(VALUES[family] | names).family == family


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
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
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
        ("partial_rotary_factor", 0.5),
        ("use_sliding_window", True),
        ("intermediate_size", None),
        ("mask_token_id", "<|mask|>"),
    ],
    "fast_dllm_v2": [("partial_rotary_factor", 0.5), ("use_sliding_window", True), ("bd_size", 0)],
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
    named = "rope_type" if key == "rope_scaling" else key
    with pytest.raises(ConfigError, match=named):
        config_from_hf(VALUES[name] | {key: value})


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
