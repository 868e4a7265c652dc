"""Quantised checkpoints, as other libraries write them."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdllm.checkpoints.conversion import to_hf, to_native
from jdllm.checkpoints.foreign import check_directory
from jdllm.checkpoints.index import StoredTensor, read_metadata, read_safetensors_index
from jdllm.checkpoints.loading import load_params, read_index
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import CheckpointError, ConfigError
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf, read_config
from tests.helpers import GOLDENS

QUANTISED = GOLDENS / "quantised"
EIGHT = SamplingParams(max_tokens=8, early_stop=False)
SUMS: dict[str, dict[str, str]] = json.loads((QUANTISED / "sha256.json").read_text())


def settings_of(scheme: str) -> dict[str, Any]:
    return read_config(QUANTISED / scheme)["quantization_config"]


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).tobytes()).hexdigest()


def whole(stored: StoredTensor) -> np.ndarray:
    return stored.read(stored.whole)


@pytest.mark.parametrize("scheme", SUMS)
def test_values_are_those_of_the_library_that_wrote_them(scheme: str):
    index = read_index(QUANTISED / scheme)
    assert {name: sha256(whole(index[name])) for name in SUMS[scheme]} == SUMS[scheme]


@pytest.mark.parametrize("scheme", SUMS)
def test_any_part_is_a_part_of_the_whole(scheme: str):
    stored = read_index(QUANTISED / scheme)["model.layers.1.mlp.gate_proj.weight"]
    values, later = whole(stored), stored.rows(40, 120)
    for rows, columns in (
        (slice(0, 120), slice(0, 64)),
        (slice(47, 50), slice(7, 64)),
        (slice(119, 120), slice(1)),
    ):
        part = [range(size)[of] for size, of in zip((120, 64), (rows, columns), strict=True)]
        np.testing.assert_array_equal(stored.read(part), values[rows, columns])
        np.testing.assert_array_equal(later.read(part), values[40:][rows, columns])


@pytest.mark.parametrize(
    "scheme",
    ["fp8_block", "int4_asymmetric", "nvfp4", "gptq_ordered", "awq", "nf4_double", "int8_rows", "ao_int4"],
)
def test_a_converted_checkpoint_is_plain(scheme: str, tmp_path: Path):
    source, config = QUANTISED / scheme, config_from_hf(QUANTISED / scheme)
    to_native(source, tmp_path / "native")
    assert "quantization_config" not in json.loads((tmp_path / "native" / "config.json").read_text())
    params, native = (load_params(path, config, "float32") for path in (source, tmp_path / "native"))
    jax.tree.map(np.testing.assert_array_equal, params, native)


def test_a_quantised_model_generates_what_its_values_generate(tmp_path: Path):
    """Against a checkpoint of plain tensors."""
    source = QUANTISED / "gptq_ordered"
    index, config = read_index(source), json.loads((source / "config.json").read_text())
    save_file({name: whole(stored) for name, stored in index.items()}, tmp_path / "model.safetensors")
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = []
    for path in (source, tmp_path):
        with LLM(path, max_num_batched_tokens=64, kv_pool="1MiB", progress=False) as llm:
            [output] = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling=EIGHT)
            found.append((output.token_ids, llm.account.weights))
    assert found[0] == found[1]


def with_settings(source: Path, target: Path, settings: dict[str, Any]) -> Path:
    """A checkpoint with other words on how it is quantised."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return target


def test_blocks_as_deepseek_writes_them(tmp_path: Path):
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 24]}
    path = with_settings(QUANTISED / "fp8_block", tmp_path / "fp8", settings)
    data = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size].replace(b"weight_scale", b"weight_scale_inv"))
    end = len(data) - 8 - size
    scale = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    header["model.layers.0.mlp.up_proj.input_scale"] = scale
    text = json.dumps(header).encode()
    renamed = len(text).to_bytes(8, "little") + text + data[8 + size :] + np.ones(1, np.float32).tobytes()
    (path / "model.safetensors").write_bytes(renamed)
    index = read_index(path)
    assert {name: sha256(whole(index[name])) for name in SUMS["fp8_block"]} == SUMS["fp8_block"]
    assert not any(name.endswith("input_scale") for name in index)


COMPRESSED: dict[str, Any] = json.loads((QUANTISED / "int4" / "config.json").read_text())[
    "quantization_config"
]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": "marlin-24", "config_groups": {"a": {"weights": {}}}}, "the format marlin-24"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "does not follow its sparsity_config"),
        ({"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        ({"config_groups": None}, "lacks config_groups"),
        ({"quant_method": "gptq", "bits": 3}, r"quant_method gptq.*bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "the checkpoint_format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "quant_method awq"),
        ({"quant_method": "hqq", "quant_config": {}}, "quant_method hqq"),
        ({"quant_method": "fp8", "weight_block_size": None}, "quant_method fp8"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes: dict[str, Any], told: str, tmp_path: Path):
    path = with_settings(QUANTISED / "int4", tmp_path / "changed", COMPRESSED | changes)
    with pytest.raises(ConfigError, match=told):
        config_from_hf(path)


def test_a_form_that_is_not_read_is_refused_with_its_module(tmp_path: Path):
    path = with_settings(QUANTISED / "int4", tmp_path / "ordered", COMPRESSED)
    stored = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    save_file({**stored, f"{name}.weight_g_idx": np.zeros(64, np.int32)}, path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"{name} has quantised weights in a form .*weight_g_idx I32 .64."
    ):
        read_index(path)


Change = Callable[[np.ndarray], np.ndarray]


@pytest.mark.parametrize(
    ("scheme", "part", "change", "told"),
    [
        ("gptq", "qweight", lambda x: x.astype(np.int64), r"jdllm does not read: qweight I64 .8, 160., "),
        ("gptq", "scales", lambda x: np.concatenate([x, x[:1]]), r"does not read: .* scales F16 .3, 160."),
        ("awq", "qzeros", lambda x: x[:, 1:], r"does not read: .* qzeros I32 .2, 19."),
        ("int4", "weight_scale", lambda x: x[1:], r"does not read: .*weight_scale F16 .159, 2."),
        ("int8_channel", "weight_scale", lambda x: x[1:], r"does not read: .*weight_scale F16 .159, 1."),
        ("nf4", "weight", lambda x: x[:-1], "10238 codes, and its state says .160, 64."),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda x: x[:-1], "no state that tells of them"),
        ("ao_int8", "_weight_scale", lambda x: x[1:], r"does not read: .*scale F32 .159, 1."),
        ("ao_int4", "_weight_zero_point", lambda x: x[1:], r"does not read: .*zero_point BF16 .1, 160."),
        ("int8_rows", "SCB", lambda x: x[:-1], "up_proj.SCB is no scale of int8 weights"),
    ],
)
def test_parts_that_do_not_fit_are_refused(scheme: str, part: str, change: Change, told: str, tmp_path: Path):
    path = with_settings(QUANTISED / scheme, tmp_path / scheme, settings_of(scheme))
    stored = {name: read.read(read.whole) for name, read in read_safetensors_index(path).items()}
    name = f"model.layers.0.mlp.up_proj.{part}"
    changed = {**stored, name: change(stored[name])}
    metadata = read_metadata(path / "model.safetensors")
    save_file(changed, path / "model.safetensors", metadata)
    with pytest.raises(CheckpointError, match=told):
        read_index(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            ("Int8Tensor", "Int4TilePackedTo4dTensor"),
            "up_proj.weight is an Int4TilePackedTo4dTensor of torchao",
        ),
        (
            ('"_type": "Int8Tensor"', '"_type": 5'),
            "up_proj.weight is an 5 of torchao, which jdllm does not read",
        ),
        (("{", "["), "up_proj.weight has parts of a matrix of torchao"),
        (("bfloat16", "float64"), r"up_proj.weight has .* does not read: .*qdata I8 .160, 64."),
        (("Int8Tensor", "Float8Tensor"), r"up_proj.weight has .* does not read: .*qdata I8 .160, 64."),
    ],
)
def test_kinds_of_torchao_that_are_not_read(change: tuple[str, str], told: str, tmp_path: Path):
    path = with_settings(QUANTISED / "ao_int8", tmp_path / "ao", settings_of("ao_int8"))
    file, name = path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    metadata = read_metadata(file)
    save_file(load_file(file), file, metadata | {name: metadata[name].replace(*change)})
    with pytest.raises(CheckpointError, match=told):
        read_index(path)


def test_metadata_of_quantised_weights_are_none_of_plain_ones(tmp_path: Path):
    to_native(QUANTISED / "ao_int8", tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "back")
    assert read_metadata(tmp_path / "back" / "model.safetensors") == {"format": "pt"}


def test_a_file_of_settings_beside_a_configuration_that_has_them_is_no_reason_to_refuse(tmp_path: Path):
    path = with_settings(QUANTISED / "gptq", tmp_path / "gptq", settings_of("gptq"))
    (path / "quantize_config.json").write_text("{}")
    check_directory(path)
