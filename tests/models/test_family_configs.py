"""What each family reads from its `config.json`."""

import dataclasses

import pytest

from jdllm.models.config import ModelConfig, MoeConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.rotary import RopeConfig
from tests.models.published_configs import VALUES


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


LLADA2_EXPERTS = MoeConfig(
    experts=16,
    top_k=3,
    expert_size=20,
    expert_bias=True,
    dense_layers=(0,),
    score="sigmoid",
    bias_weighs=False,
    groups=4,
    kept_groups=2,
    normalized=True,
    scale=2.5,
    shared_size=20,
)


def test_llada2_is_translated():
    assert config_from_hf(VALUES["llada2"]) == ModelConfig(
        family="llada2",
        vocab_size=512,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=160,
        max_positions=32768,
        rms_norm_eps=1e-6,
        rope=RopeConfig(600000.0, fraction=0.5),
        qk_norm=True,
        attention="block_causal",
        block_length=32,
        moe=LLADA2_EXPERTS,
        eos_id=508,
        dtype="float32",
    )


def test_an_absent_key_of_llada2_is_what_its_class_takes():
    absent = (
        "first_k_dense_replace", "n_group", "topk_group", "num_shared_experts", "partial_rotary_factor",
        "routed_scaling_factor", "use_qk_norm",
    )  # fmt: skip
    config = config_from_hf({key: value for key, value in VALUES["llada2"].items() if key not in absent})
    assert config.moe == dataclasses.replace(
        LLADA2_EXPERTS, dense_layers=(), groups=8, kept_groups=4, shared_size=0
    )
    assert (config.rope.fraction, config.qk_norm) == (0.5, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_shared_experts": 2}, {"shared_size": 40}),
        ({"num_shared_experts": None}, {"shared_size": 0}),
        ({"first_k_dense_replace": 2}, {"dense_layers": (0, 1)}),
        ({"num_experts_per_tok": 1}, {"top_k": 1, "normalized": False}),
    ],
)
def test_the_experts_of_llada2_are_read(changes, expected):
    assert config_from_hf(VALUES["llada2"] | changes).moe == dataclasses.replace(LLADA2_EXPERTS, **expected)


def test_each_card_has_a_part_of_the_shared_expert():
    part = dataclasses.replace(config_from_hf(VALUES["llada2"]), cards=2).on_card().moe
    assert part == dataclasses.replace(LLADA2_EXPERTS, expert_size=10, shared_size=10)


def test_llada2_may_state_its_block():
    assert config_from_hf(VALUES["llada2"] | {"block_length": 16}).block_length == 16


def test_nemotron_is_translated():
    assert config_from_hf(VALUES["nemotron_labs_diffusion"]) == ModelConfig(
        family="nemotron_labs_diffusion",
        vocab_size=320,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_positions=262144,
        rms_norm_eps=1e-5,
        rope=RopeConfig(1e6, kind="yarn", factor=16.0, original_positions=16384, query_beta=0.1),
        attention="block_causal",
        block_length=8,
        causal_context=True,
        mask_id=100,
        bos_id=1,
        eos_id=11,
        dtype="float32",
    )


def test_nemotron_without_scaling():
    values = {key: value for key, value in VALUES["nemotron_labs_diffusion"].items() if key != "block_size"}
    config = config_from_hf(values | {"rope_parameters": None})
    assert (config.rope, config.block_length) == (RopeConfig(1e6), 32)


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
        "llada2", "llada_moe", "qwen3", "sdar", "sdar_moe",
    }  # fmt: skip
    assert {name for name, config in configs.items() if config.tied_head} == {"llama31_rope", "qwen2"}
    assert {name: c.sliding_window for name, c in configs.items() if c.sliding_window} == {"mistral_swa": 12}
    assert {name for name, config in configs.items() if config.logits_shift} == {"dream", "fast_dllm_v2"}
    assert configs["llama31_rope"].rope.kind == "llama3"
    assert all(config.mask_id is None for name, config in configs.items() if name in causal)


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
        (["LLaDA2MoeModelLM"], None, "llada2"),
        (None, "llada2_moe", "llada2"),
        (["SDARForCausalLM"], None, "sdar"),
        (None, "sdar", "sdar"),
        (None, "sdar_moe", "sdar_moe"),
        (["NemotronLabsDiffusionModel"], None, "nemotron_labs_diffusion"),
        (None, "nemotron_labs_diffusion", "nemotron_labs_diffusion"),
    ],
)
def test_the_architecture_decides_before_the_model_type(architectures, model_type, family):
    names = {"architectures": architectures, "model_type": model_type}
    assert config_from_hf(VALUES[family] | names).family == family
