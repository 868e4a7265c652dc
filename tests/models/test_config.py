import json

import pytest

from jdllm.errors import ConfigError
from jdllm.models.config import ModelConfig, read_config
from jdllm.models.rotary import RopeConfig
from jdllm.models.weights import param_bytes
from tests.helpers import Golden

TINY = Golden("llada").json("config")
LLADA_8B = TINY | {
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "torch_dtype": "bfloat16",
}


def without(key: str) -> dict:
    return {k: v for k, v in TINY.items() if k != key}


def test_llada_is_translated():
    assert ModelConfig.from_hf(TINY) == ModelConfig(
        family="llada",
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=160,
        max_positions=4096,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0),
        mask_id=510,
        eos_id=505,
    )


def test_llada_8b_has_the_published_bytes():
    config = ModelConfig.from_hf(LLADA_8B)
    assert config.dtype == "bfloat16"
    assert param_bytes(config, config.dtype) == 16_031_162_368
    assert config.head_dim == 128
    assert config.mask_id == 126336
    assert config.stop_ids == (126081,)


def test_from_hf_takes_values_a_file_or_a_directory():
    directory = Golden("llada").directory
    by_value = ModelConfig.from_hf(TINY)
    assert ModelConfig.from_hf(directory) == by_value
    assert ModelConfig.from_hf(str(directory / "config.json")) == by_value
    assert hash(ModelConfig.from_hf(directory)) == hash(by_value)


def test_optional_keys():
    config = ModelConfig.from_hf(
        TINY
        | {
            "eos_token_id": [7, 8],
            "eot_token_id": 9,
            "n_kv_heads": 2,
            "weight_tying": True,
            "rope_scaling": {"rope_type": "ntk", "factor": 32.0},
            "dtype": "float32",
        }
    )
    assert config.stop_ids == (7, 9)
    assert config.num_kv_heads == 2
    assert config.tied_head
    assert config.rope.effective_context(config.max_positions) == 131072
    assert config.dtype == "float32"


@pytest.mark.parametrize("key", ["d_model", "n_layers", "n_heads"])
def test_a_missing_size_is_named(key):
    with pytest.raises(ConfigError, match=f"'{key}'"):
        ModelConfig.from_hf(without(key))


@pytest.mark.parametrize(
    "key", ["n_kv_heads", "mlp_ratio", "rms_norm_eps", "max_sequence_length", "weight_tying"]
)
def test_other_keys_have_the_published_defaults(key):
    assert ModelConfig.from_hf(without(key)) == ModelConfig.from_hf(TINY)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("d_model", 0),
        ("d_model", -64),
        ("d_model", 64.5),
        ("d_model", "64"),
        ("n_layers", True),
        ("n_heads", 3),
        ("n_kv_heads", 3),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", True),
        ("weight_tying", 1),
        ("mask_token_id", "<mask>"),
        ("mask_token_id", -1),
        ("eos_token_id", [True]),
        ("torch_dtype", "int8"),
        ("torch_dtype", 16),
        ("alibi", True),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("block_type", "sequential"),
        ("layer_norm_type", "low_precision"),
        ("activation_type", "gelu"),
        ("rope", False),
        ("scale_logits", True),
        ("block_group_size", 2),
        ("rope_scaling", {"rope_type": "spiral", "factor": 2}),
    ],
)
def test_an_impossible_value_is_named(key, value):
    named = "rope_type" if key == "rope_scaling" else key
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(TINY | {key: value})


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": [], "model_type": None},
        {"architectures": "LLaDAModelLM"},
        {"architectures": 5, "model_type": ["llada"]},
        {"architectures": [["LLaDAModelLM"]]},
        {},
    ],
)
def test_an_unknown_family_lists_the_known_ones(values):
    with pytest.raises(ConfigError, match=r"unknown model family.*LLaDAModelLM"):
        ModelConfig.from_hf(values)


@pytest.mark.parametrize("model_type", ["llada", None])
def test_the_family_is_found_by_architecture_or_type(model_type):
    values = TINY | ({"architectures": None, "model_type": "llada"} if model_type else {"model_type": None})
    assert ModelConfig.from_hf(values).family == "llada"


@pytest.mark.parametrize("content", ["{", "", "[1, 2]", "null", "\xff"])
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_directory_without_a_configuration_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"no config.json at {tmp_path}"):
        read_config(tmp_path)


def test_non_finite_numbers_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"rms_norm_eps": float("nan")}))
    with pytest.raises(ConfigError, match="rms_norm_eps"):
        ModelConfig.from_hf(tmp_path)
