"""A model that is saved and read again, by the safetensors library, by jdllm and by `LLM`."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from transformers import AutoConfig

from jdllm import LLM, CheckpointError, SamplingParams, Transformer
from jdllm.checkpoints.conversion import to_native
from jdllm.demo import checkpoint_path
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from tests.helpers import Golden


def load(directory: Path, dtype: str = "auto") -> Transformer:
    return Transformer.from_pretrained(directory, dtype=dtype)


@pytest.mark.parametrize("family", ["llada", "dream", "llada2", "llada_moe", "qwen2"])
def test_every_tensor_comes_back(family: str, tmp_path: Path):
    """Under their published names: of experts, of several weights in one tensor, and with a tied head."""
    source = Golden(family).directory
    load(source).save_pretrained(tmp_path / "saved")
    theirs, ours = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "saved" / "model.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    assert (tmp_path / "saved" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.slow
def test_changed_weights_in_another_type(tmp_path: Path):
    model = load(checkpoint_path(), dtype="float32")
    model.layers.attention.q[...] = model.layers.attention.q[...] + 0.3
    model.save_pretrained(tmp_path / "half", dtype="float16")
    saved = load(tmp_path / "half")
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_array_equal(ours, np.asarray(theirs, np.float16)),
        saved.params(),
        model.params(),
    )
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    saved.save_pretrained(tmp_path / "half", overwrite=True)
    np.testing.assert_array_equal(load(tmp_path / "half").embed[...], saved.embed[...])


@pytest.mark.slow
def test_it_generates_with_the_tokenizer_of_its_source(tmp_path: Path):
    load(checkpoint_path()).save_pretrained(tmp_path / "saved")
    sampling = SamplingParams(gen_length=8, steps=8, block_length=8)
    texts = []
    for directory in (checkpoint_path(), tmp_path / "saved"):
        with LLM(directory, max_num_batched_tokens=64, progress=False) as llm:
            texts.append(llm.generate("12+34=", sampling)[0].text)
    assert texts == ["46", "46"]


def test_a_native_checkpoint_becomes_one_of_hugging_face(tmp_path: Path):
    source = Golden("qwen2").directory
    to_native(source, tmp_path / "native")
    load(tmp_path / "native").save_pretrained(tmp_path / "saved")
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == sorted(
        file.name for file in source.iterdir() if not file.name.startswith("goldens.s")
    )
    assert AutoConfig.from_pretrained(tmp_path / "saved").model_type == "qwen2"
    theirs, ours = (load_file(path / "model.safetensors") for path in (source, tmp_path / "saved"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)


def test_a_model_from_memory_is_saved_like_another(tmp_path: Path, config: ModelConfig):
    model = Transformer(config, rngs=nnx.Rngs(1))
    model.save_pretrained(tmp_path / "saved", like=Golden("llada").directory)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "saved").params(), model.params())


class TestRefused:
    def test_nothing_to_copy_from(self, params: Params, config: ModelConfig, tmp_path: Path):
        with pytest.raises(CheckpointError, match="not loaded from one: give like=DIRECTORY"):
            Transformer(config, params).save_pretrained(tmp_path / "saved")

    def test_another_model(self, params: Params, config: ModelConfig, tmp_path: Path):
        model = Transformer(dataclasses.replace(config, rms_norm_eps=1e-3), params)
        with pytest.raises(CheckpointError, match=r"config.json is of another model: .* in rms_norm_eps"):
            model.save_pretrained(tmp_path / "saved", like=Golden("llada").directory)

    def test_a_directory_that_exists(self, tmp_path: Path):
        with pytest.raises(CheckpointError, match="exists: give another name, or replace it"):
            load(Golden("llada").directory).save_pretrained(tmp_path)

    def test_an_unknown_type(self, tmp_path: Path):
        with pytest.raises(
            CheckpointError, match="dtype is 'int8', expected one of bfloat16, float16, float32"
        ):
            load(Golden("llada").directory).save_pretrained(tmp_path / "saved", dtype="int8")
        assert list(tmp_path.iterdir()) == []
