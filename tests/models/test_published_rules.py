"""Keys of `config.json` as transformers itself takes them: its configuration classes and rotary functions."""

import numpy as np
import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, modeling_rope_utils

from jdllm.errors import ConfigError
from jdllm.models.hf_config import config_from_hf
from jdllm.models.rotary import RopeConfig, inverse_frequencies
from tests.helpers import Golden
from tests.models import qwen3_reference

CLASSES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VALUES = {name: Golden(name).json("config") for name in ("llama", "mistral", "qwen2")} | {
    "qwen3": qwen3_reference.VALUES
}
ABSENT = (
    "eos_token_id",
    "num_key_value_heads",
    "sliding_window",
    "tie_word_embeddings",
    "rope_theta",
    "head_dim",
)
SIZES = {"num_attention_heads": 32, "hidden_size": 512}


class _Array(np.ndarray):
    """What transformers' rotary functions use of a tensor, in NumPy."""

    def to(self, device=None, dtype=None):
        return self if dtype is None else self.astype(dtype)


class _Torch:
    float = float32 = np.float32
    int64 = np.int64
    clamp = staticmethod(np.clip)
    where = staticmethod(np.where)

    @staticmethod
    def arange(*bounds, dtype=np.int64):
        return np.arange(*bounds, dtype=dtype).view(_Array)


@pytest.mark.parametrize("key", ABSENT)
@pytest.mark.parametrize("name", CLASSES)
def test_an_absent_key_is_what_the_class_of_transformers_takes(name, key):
    values = {k: v for k, v in (VALUES[name] | SIZES).items() if k != key}
    ours, theirs = config_from_hf(values), CLASSES[name].from_dict(values)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // 32)
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
ROTARY = {
    "yarn": {"rope_scaling": YARN},
    "yarn by its own key": {"rope_scaling": YARN | {ORIGINAL: 4096}},
    "yarn by a key beside": {"rope_scaling": YARN, ORIGINAL: 2048},
    "yarn by both": {"rope_scaling": YARN | {ORIGINAL: 4096}, ORIGINAL: 2048},
    "mscale alone": {"rope_scaling": YARN | {"mscale": 0.7}},
    "mscale of both": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "not truncated": {"rope_scaling": YARN | {"truncate": False, ORIGINAL: 4096}},
    "in the new spelling": {"rope_parameters": YARN | {"rope_theta": 5e5, "beta_fast": 16}},
    "new beside an empty old": {"rope_scaling": {}, "rope_parameters": YARN | {"rope_theta": 5e5}},
    "old beside an empty new": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {}},
    "llama3 by both": {"rope_scaling": LLAMA3 | {ORIGINAL: 64}, ORIGINAL: 128},
}


@pytest.mark.parametrize("case", ROTARY)
@pytest.mark.parametrize("name", CLASSES)
def test_frequencies_are_those_of_transformers(monkeypatch, name, case):
    scaling = {"rope_scaling": None, "max_position_embeddings": 16384} | ROTARY[case]
    values = VALUES[name] | scaling | {"head_dim": 64}
    rope = config_from_hf(values).rope
    theirs = CLASSES[name].from_dict(values)
    monkeypatch.setattr(modeling_rope_utils, "torch", _Torch, raising=False)
    function = modeling_rope_utils.ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]]
    frequencies, factor = function(theirs, None)
    np.testing.assert_allclose(inverse_frequencies(rope, 64), frequencies, rtol=2e-6)
    assert rope.attention_factor == pytest.approx(factor)


def test_both_objects_empty_are_no_scaling():
    assert RopeConfig.from_hf({"rope_scaling": {}, "rope_parameters": {}}, 1e4) == RopeConfig(1e4)


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
WINDOWS = {
    "not used": {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
    "from the first layer on": WINDOW | {"max_window_layers": 0},
    "from before the first layer on": WINDOW | {"max_window_layers": -1},
    "from the second layer on": WINDOW | {"max_window_layers": 1},
    "from the last layer on": WINDOW | {"max_window_layers": 3},
    "from no layer on": WINDOW | {"max_window_layers": 4},
    "from an absent layer on": WINDOW,
    "no window": WINDOW | {"sliding_window": None, "max_window_layers": 0},
    "an absent window": {"use_sliding_window": True, "max_window_layers": 0},
    "an absent use": {"sliding_window": 7, "max_window_layers": 0},
    "all listed": WINDOW | {"layer_types": [SLIDING] * 4, "max_window_layers": 4},
    "none listed": WINDOW | {"layer_types": [FULL] * 4, "max_window_layers": 0},
    "no list": WINDOW | {"layer_types": None, "max_window_layers": 0},
    "first listed": WINDOW | {"layer_types": [SLIDING, FULL, FULL, FULL]},
    "others listed": WINDOW | {"layer_types": [FULL, SLIDING, SLIDING, SLIDING]},
}


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_are_those_of_transformers_or_refused(name, case):
    keys = ("use_sliding_window", "sliding_window", "max_window_layers")
    values = {key: value for key, value in VALUES[name].items() if key not in keys}
    values |= {"num_hidden_layers": 4} | WINDOWS[case]
    theirs = CLASSES[name].from_dict(values)
    windows = {theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types}
    if len(windows) > 1:
        with pytest.raises(ConfigError, match=r"(max_window_layers|layer_types) .*layer"):
            config_from_hf(values)
    else:
        assert {config_from_hf(values).sliding_window} == windows
