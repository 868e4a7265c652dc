"""`jdllm convert --quantize int4` and `uint4`: numbers in pairs, and the scales and offsets of groups."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from jdllm.checkpoints.conversion import to_hf, to_native
from jdllm.checkpoints.loading import load_params
from jdllm.checkpoints.native import compare_checksums, read_manifest
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import CheckpointError
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.quantised import Grouped, Quantised, unpacked
from tests.helpers import GOLDENS
from tests.rounding import (
    rounded_in_groups_by_numpy,
    rounded_to_4_bits,
    rounded_with_offsets_by_numpy,
)

LLAMA = GOLDENS / "llama"
DOWN = "model.layers.1.mlp.down_proj.weight"
"""Of 64 outputs and 160 inputs, which are two groups."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("groups") / "llama"
    to_native(LLAMA, target, quantize="int4")
    return target


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def test_numbers_are_in_the_order_of_inputs_and_the_first_of_two_is_the_lower_one(converted: Path):
    tensors = load_file(LLAMA / "model.safetensors")
    stored = {t.name: t for t in read_manifest(converted).tensors}
    in_pairs = {name for name, tensor in stored.items() if tensor.dtype == "U8"}
    assert in_pairs == {name for name, x in tensors.items() if x.ndim == 2 and ".layers." in name}
    for name in in_pairs:
        own, of_groups = stored[name], stored[f"{name}_scale"]
        values = np.fromfile(converted / own.chunk, np.uint8).reshape(own.shape)
        scales = np.fromfile(converted / of_groups.chunk, np.float32).reshape(of_groups.shape)
        expected, steps = rounded_in_groups_by_numpy(tensors[name])
        np.testing.assert_array_equal(values & 15, expected[:, ::2] + 8)
        np.testing.assert_array_equal(values >> 4, expected[:, 1::2] + 8)
        np.testing.assert_allclose(scales, steps, rtol=1e-6)
    assert stored[f"{DOWN}_scale"].shape == (64, 2)


def test_stored_numbers_are_loaded_as_they_are(copy: Path):
    """Rounding a matrix again would make -8 of its furthest number."""
    rng = np.random.default_rng(0)
    values = rng.integers(6, 11, (64, 80)) + 16 * rng.integers(6, 11, (64, 80))
    scales = np.linspace(1, 2, 128, dtype=np.float32).reshape(64, 2)
    values.astype(np.uint8).tofile(copy / "layers.down.values" / "1.0.0")
    scales.tofile(copy / "layers.down.scales" / "1.0.0")
    params = load_params(copy, config_from_hf(copy).quantised("int4"), "float32")
    down = params["layers"]["down"]
    assert isinstance(down, Grouped)
    found = np.asarray(unpacked(down.values))[1]
    np.testing.assert_array_equal(found[:, ::2], values % 16 - 8)
    np.testing.assert_array_equal(found[:, 1::2], values // 16 - 8)
    np.testing.assert_array_equal(down.scales[1], scales.T)


def test_a_model_runs_as_one_that_is_rounded_while_it_is_loaded(tmp_path: Path):
    native, options = tmp_path / "native", {"max_num_batched_tokens": 128, "kv_pool": "1MiB"}
    to_native(GOLDENS / "llada", native, quantize="int4")
    found: list[Any] = []
    for path, form in ((GOLDENS / "llada", "int4"), (native, None)):
        with LLM(path, quantization=form, progress=False, **options) as llm:
            assert llm.config.quantization == "int4"
            sampling = SamplingParams(gen_length=16, steps=8)
            outputs = llm.generate(prompt_token_ids=[[5, 6, 7], [20, 21]], sampling=sampling)
            found.append(([out.token_ids for out in outputs], llm.account.weights))
    assert found[0] == found[1]


def test_the_way_back_writes_what_the_numbers_stand_for(converted: Path, tmp_path: Path):
    to_hf(converted, tmp_path / "back")
    tensors, found = (load_file(path / "model.safetensors") for path in (LLAMA, tmp_path / "back"))
    assert list(found) == list(tensors)
    for name, x in tensors.items():
        in_layers = x.ndim == 2 and ".layers." in name
        np.testing.assert_allclose(found[name], rounded_to_4_bits(x) if in_layers else x, rtol=1e-6)
    config = json.loads((LLAMA / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_another_form_is_rounded_again(converted: Path, tmp_path: Path):
    to_hf(converted, tmp_path / "back")
    found, expected = (
        load_params(path, config_from_hf(path).quantised("int8"), "float32")
        for path in (converted, tmp_path / "back")
    )
    assert isinstance(found["layers"]["q"], Quantised)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_adapter_is_merged_into_what_the_numbers_stand_for(converted: Path, tmp_path: Path):
    adapter, config = GOLDENS / "lora" / "linear", config_from_hf(LLAMA).quantised("int4")
    to_hf(converted, tmp_path / "back")
    found, expected = (
        load_params(path, config, "float32", adapter=adapter) for path in (converted, tmp_path / "back")
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_orbax_restores_numbers_and_scales(converted: Path):
    with ocp.StandardCheckpointer() as reader:
        down = reader.restore(converted)["layers"]["down"]
    shapes = {name: (down[name].dtype, down[name].shape) for name in ("values", "scales")}
    assert shapes == {"values": (np.uint8, (2, 64, 80)), "scales": (np.float32, (2, 64, 2))}
    scales = np.fromfile(converted / "layers.down.scales" / "1.0.0", np.float32)
    np.testing.assert_array_equal(down["scales"][1].ravel(), scales)


def test_damage_is_found(copy: Path):
    compare_checksums(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    next(one for one in manifest["tensors"] if one["name"] == f"{DOWN}_scale")["shape"] = [128]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    said = r"is U8 \[64, 80\] and its scales are F32 \[128\]: .* F32 for each 128 inputs of a row"
    with pytest.raises(CheckpointError, match=said):
        load_params(copy, config_from_hf(copy).quantised("int4"), "float32")


def test_offsets_are_stored_beside_scales(tmp_path: Path):
    native = tmp_path / "native"
    to_native(LLAMA, native, quantize="uint4")
    stored = {tensor.name: tensor for tensor in read_manifest(native).tensors}
    with ocp.StandardCheckpointer() as reader:
        down = reader.restore(native)["layers"]["down"]
    shapes = {name: (part.dtype, part.shape) for name, part in down.items()}
    of_groups = jnp.bfloat16, (2, 64, 5)
    assert shapes == {"values": (np.uint8, (2, 64, 80)), "scales": of_groups, "offsets": of_groups}
    values, *others = rounded_with_offsets_by_numpy(load_file(LLAMA / "model.safetensors")[DOWN])
    np.testing.assert_array_equal(down["values"][1] & 15, values[:, ::2] + 8)
    for part, expected in zip(("scales", "offsets"), others, strict=True):
        np.testing.assert_array_equal(down[part][1].astype(np.float32), expected)
        file = native / stored[f"{DOWN}_{part.removesuffix('s')}"].chunk
        assert file.read_bytes() == down[part][1].tobytes()
    manifest = json.loads((native / "manifest.json").read_text())
    next(one for one in manifest["tensors"] if one["name"] == f"{DOWN}_offset")["shape"] = [320]
    (native / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"its offsets are BF16 \[320\]: .* BF16 for each 32 inputs"):
        load_params(native, config_from_hf(native).quantised("uint4"), "float32")
