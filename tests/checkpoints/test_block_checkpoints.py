"""What checkpoints of block models have and others have not: weights in one tensor, and what is not read."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jdllm.checkpoints import loading
from jdllm.checkpoints.loading import load_params, resolve
from jdllm.errors import CheckpointError
from jdllm.models.hf_config import config_from_hf
from tests.conftest import LLADA
from tests.helpers import Golden

FILE = "model.safetensors"


@pytest.mark.parametrize("piece_bytes", [1000, 8 << 20])
def test_rows_of_one_tensor_are_read_once(monkeypatch, piece_bytes):
    """Of LLaDA2, whose queries, keys and values are rows of a tensor, in this order."""
    monkeypatch.setattr(loading, "PIECE_BYTES", piece_bytes)
    golden, calls = Golden("llada2"), []
    config, tensors = config_from_hf(golden.directory), golden.tensors("model")
    params = load_params(golden.directory, config, "float32", progress=lambda *call: calls.append(call))
    for layer, (stack, place) in enumerate([("dense_layers", 0), ("layers", 0), ("layers", 1)]):
        rows = np.split(tensors[f"model.layers.{layer}.attention.query_key_value.weight"], [64, 96])
        for name, expected in zip("qkv", rows, strict=True):
            np.testing.assert_array_equal(params[stack][name][place], expected, err_msg=name)
    assert calls[-1] == (sum(x.nbytes for x in tensors.values()),) * 2


def test_scales_of_caches_and_an_adapter_are_left_alone(tmp_path):
    """Both may lie with a Nemotron-Labs-Diffusion checkpoint; such scales are unknown to other families."""
    golden = Golden("nemotron_labs_diffusion")
    copied, config = tmp_path / "copied", config_from_hf(golden.directory)
    shutil.copytree(golden.directory, copied)
    scales = {f"encoder.layers.0.self_attn.{name}": np.ones(1, np.float32) for name in ("k_scale", "v_scale")}
    save_file(golden.tensors("model") | scales, copied / FILE)
    ours, theirs = (load_params(resolve(path), config, "float32") for path in (copied, golden.directory))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert (copied / "linear_spec_lora" / "adapter_config.json").is_file()
    save_file(LLADA.tensors("model") | scales, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"2 unknown: encoder.layers.0.self_attn.k_scale"):
        load_params(tmp_path, config_from_hf(LLADA.directory), "float32")


def test_a_tensor_of_several_weights_has_all_of_their_rows(tmp_path):
    golden, name = Golden("llada2"), "model.layers.1.attention.query_key_value.weight"
    tensors = golden.tensors("model")
    save_file(tensors | {name: tensors[name][:96]}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=rf"{name} is \[96, 64\], expected \[128, 64\]"):
        load_params(tmp_path, config_from_hf(golden.directory), "float32")
