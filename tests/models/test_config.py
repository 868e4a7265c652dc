import dataclasses
import json
from pathlib import Path

import pytest

from jdllm.errors import ConfigError
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_checkpoint, config_from_hf, read_config
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
    assert config_from_hf(TINY) == ModelConfig(
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
    config = config_from_hf(LLADA_8B)
    assert config.dtype == "bfloat16"
    assert param_bytes(config, config.dtype) == 16_031_162_368
    assert config.head_dim == 128
    assert config.mask_id == 126336
    assert config.stop_ids == (126081,)


def test_from_hf_takes_values_a_file_or_a_directory():
    directory = Golden("llada").directory
    by_value = config_from_hf(TINY)
    assert config_from_hf(directory) == by_value
    assert config_from_hf(str(directory / "config.json")) == by_value
    assert hash(config_from_hf(directory)) == hash(by_value)


def test_optional_keys():
    config = config_from_hf(
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
    assert config.eos_id == 7
    assert config.stop_ids == (7, 8, 9)
    assert config.num_kv_heads == 2
    assert config.tied_head
    assert config.rope.effective_context(config.max_positions) == 131072
    assert config.dtype == "float32"


@pytest.mark.parametrize("key", ["d_model", "n_layers", "n_heads"])
def test_a_missing_size_is_named(key):
    with pytest.raises(ConfigError, match=f"'{key}'"):
        config_from_hf(without(key))


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("n_kv_heads", {}),
        ("mlp_ratio", {}),
        ("rms_norm_eps", {}),
        ("max_sequence_length", {"max_positions": 1024}),
        ("weight_tying", {"tied_head": True}),
        ("rope_theta", {"rope": RopeConfig(10000.0)}),
        ("embedding_size", {"vocab_size": 50304}),
    ],
)
def test_other_keys_have_the_published_defaults(key, changed):
    expected = dataclasses.replace(config_from_hf(TINY), **changed)
    assert config_from_hf(without(key)) == expected


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("layer_norm_type", "default"),
        ("block_type", "sequential"),
        ("activation_type", "swiglu"),
        ("rope", False),
    ],
)
def test_an_absent_key_is_what_the_published_class_takes(key, default):
    with pytest.raises(ConfigError, match=f"{key} is {default!r} .the published default where it is absent"):
        config_from_hf(without(key))
    with pytest.raises(ConfigError, match=f"{key} is None"):
        config_from_hf(TINY | {key: None})


def checkpoint(directory: Path, eos, generation_eos) -> Path:
    for name, values in (("config", TINY | {"eos_token_id": eos}), ("generation_config", generation_eos)):
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("eos", "generation", "stops"),
    [
        (7, {"eos_token_id": [9, 7, 8]}, (7, 9, 8)),
        ([7, 8], {"eos_token_id": 5}, (7, 8, 5)),
        (None, {"eos_token_id": [9, 8]}, (9, 8)),
        (7, {"temperature": 0.5}, (7,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_all_ends_of_sequence_of_a_checkpoint_end_a_text(tmp_path, eos, generation, stops):
    config = config_from_checkpoint(checkpoint(tmp_path, eos, generation))
    assert config.stop_ids == stops
    assert config.eos_id == (stops[0] if stops else None)


def test_an_override_of_the_end_of_sequence_is_alone(tmp_path):
    directory = checkpoint(tmp_path, 7, {"eos_token_id": [8]})
    assert config_from_checkpoint(directory, {"eos_token_id": 3}).stop_ids == (3,)


def test_a_malformed_end_of_sequence_names_its_file(tmp_path):
    directory = checkpoint(tmp_path, 7, {"eos_token_id": "</s>"})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        config_from_checkpoint(directory)


@pytest.mark.parametrize(
    ("key", "number"),
    [("n_layers", "1" + "0" * 30), ("d_model", "9" * 5000), ("rope_theta", "1" + "0" * 400)],
)
def test_numbers_without_end_name_their_key(tmp_path, key, number):
    text = json.dumps(TINY | {key: "NUMBER"}).replace('"NUMBER"', number)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"config.json: {key}"):
        config_from_hf(tmp_path)


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
        ("rms_norm_eps", -1e-5),
        ("quantization_config", {"quant_method": "awq"}),
        ("partial_rotary_factor", 0.5),
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
        config_from_hf(TINY | {key: value})


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
        config_from_hf(values)


@pytest.mark.parametrize("model_type", ["llada", None])
def test_the_family_is_found_by_architecture_or_type(model_type):
    values = TINY | ({"architectures": None, "model_type": "llada"} if model_type else {"model_type": None})
    assert config_from_hf(values).family == "llada"


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
        config_from_hf(tmp_path)


@pytest.mark.parametrize(
    ("kv_heads", "cards", "own", "copies"),
    [(8, 1, 8, 1), (8, 4, 2, 1), (4, 4, 1, 1), (4, 8, 1, 2), (1, 4, 1, 4)],
)
def test_a_card_has_a_part_of_the_key_value_heads_or_shares_one(
    kv_heads: int, cards: int, own: int, copies: int
):
    whole = dataclasses.replace(config_from_hf(LLADA_8B), num_kv_heads=kv_heads, cards=cards)
    part = whole.on_card()
    assert (part.num_kv_heads, part.kv_copies, part.num_heads) == (own, copies, 32 // cards)


def test_cards_that_cannot_share_key_value_heads_equally_are_refused():
    sizes: dict[str, int] = {"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 12288}
    with pytest.raises(ConfigError, match="num_kv_heads is 4, of which 6 cards cannot have equal parts"):
        dataclasses.replace(config_from_hf(LLADA_8B), cards=6, **sizes).on_card()
