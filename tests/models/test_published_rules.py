"""Keys of `config.json` as transformers itself takes them: its configuration classes and rotary functions."""

import numpy as np
import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, modeling_rope_utils

from jdllm.models.hf_config import config_from_hf
from jdllm.models.rotary import RopeConfig, inverse_frequencies
from tests.helpers import Golden

CLASSES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}
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
    values = {k: v for k, v in (Golden(name).json("config") | SIZES).items() if k != key}
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
    values = Golden(name).json("config") | scaling | {"head_dim": 64}
    rope = config_from_hf(values).rope
    theirs = CLASSES[name].from_dict(values)
    monkeypatch.setattr(modeling_rope_utils, "torch", _Torch, raising=False)
    function = modeling_rope_utils.ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]]
    frequencies, factor = function(theirs, None)
    np.testing.assert_allclose(inverse_frequencies(rope, 64), frequencies, rtol=2e-6)
    assert rope.attention_factor == pytest.approx(factor)


def test_both_objects_empty_are_no_scaling():
    assert RopeConfig.from_hf({"rope_scaling": {}, "rope_parameters": {}}, 1e4) == RopeConfig(1e4)
