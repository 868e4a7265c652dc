"""Conversion there and back: bytes, types, other files, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jdllm.checkpoints.conversion import to_hf, to_native
from jdllm.checkpoints.loading import load_params
from jdllm.checkpoints.native import compare_checksums, read_manifest
from jdllm.errors import CheckpointError, ConfigError, JdllmError
from jdllm.models.hf_config import config_from_hf
from tests.convert.helpers import contents, tensors_of
from tests.helpers import Golden

GOLDEN = Golden("llada")
CONFIG = config_from_hf(GOLDEN.directory)
BLOCK = "model.transformer.blocks."


def write(directory: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """A single-file checkpoint of the tiny model with other tensors."""
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    values = GOLDEN.json("config") | config
    (directory / "config.json").write_text(json.dumps(values))
    return directory


# Round trip


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_file_comes_back_byte_by_byte(tmp_path, dtype):
    tensors = {name: value.astype(dtype) for name, value in GOLDEN.tensors("model").items()}
    source = write(tmp_path / "source", tensors)
    manifest = to_native(source, tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    assert manifest.bytes == sum(value.nbytes for value in tensors.values())
    assert {tensor.name for tensor in manifest.tensors} == tensors.keys()


@pytest.mark.parametrize("family", ["llada2", "llada_moe", "nemotron_labs_diffusion", "dream", "qwen2"])
def test_every_family_comes_back_byte_by_byte(tmp_path, family):
    source = Golden(family).directory
    to_native(source, tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "back")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


def test_the_adapter_for_drafts_is_copied(tmp_path):
    source = Golden("nemotron_labs_diffusion").directory
    to_native(source, tmp_path / "native", dtype="bfloat16")
    to_hf(tmp_path / "native", tmp_path / "back")
    adapter = contents(source / "linear_spec_lora")
    assert adapter.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    for target in ("native", "back"):
        assert contents(tmp_path / target / "linear_spec_lora") == adapter


def test_shards_come_back_with_their_tensors(tmp_path, source):
    to_native(source, tmp_path / "native")
    back = tmp_path / "back"
    to_hf(tmp_path / "native", back)
    assert tensors_of(back) == tensors_of(source)
    for file in source.glob("*.safetensors"):
        assert load_file(back / file.name).keys() == load_file(file).keys()
    indices = [json.loads((path / "model.safetensors.index.json").read_text()) for path in (source, back)]
    assert indices[1]["weight_map"] == indices[0]["weight_map"]
    assert indices[1]["metadata"]["total_size"] == sum(
        len(data) for _, _, data in tensors_of(source).values()
    )


def test_other_files_are_copied_verbatim(tmp_path, source):
    to_native(source, tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "back")
    expected = {name: data for name, data in contents(source).items() if "safetensors" not in name}
    del expected["pytorch_model.bin"]
    assert len(expected) == 7
    assert contents(tmp_path / "native").items() >= expected.items()
    back = contents(tmp_path / "back")
    assert {name: data for name, data in back.items() if "safetensors" not in name} == expected


def test_nothing_but_the_checkpoint_is_left(tmp_path, source):
    to_native(source, tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "native", "back"}
    assert not any("conversion" in name for path in ("native", "back") for name in contents(tmp_path / path))


def test_metadata_of_the_header_comes_back(tmp_path):
    source = write(tmp_path / "source", GOLDEN.tensors("model"))
    save_file(GOLDEN.tensors("model"), source / "model.safetensors", metadata={"format": "pt", "ü": "\n"})
    to_native(source, tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "back")
    with safe_open(tmp_path / "back" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "ü": "\n"}


def test_tensors_that_the_model_computes_are_left_out(tmp_path):
    tensors = GOLDEN.tensors("model")
    tensors[f"{BLOCK}0.rotary_emb.inv_freq"] = np.ones(8, np.float64)
    tensors["model.transformer.ff_out.weight"] = tensors["model.transformer.wte.weight"].copy()
    source = write(tmp_path / "source", tensors, weight_tying=True)
    manifest = to_native(source, tmp_path / "native")
    omitted = {f"{BLOCK}0.rotary_emb.inv_freq", "model.transformer.ff_out.weight"}
    assert set(manifest.omitted) == omitted
    assert read_manifest(tmp_path / "native") == manifest
    to_hf(tmp_path / "native", tmp_path / "back")
    assert tensors_of(tmp_path / "back").keys() == tensors.keys() - omitted


# Types


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("asked", ["bfloat16", "float16", "float32"])
def test_a_cast_equals_a_cast_while_loading(tmp_path, stored, asked):
    values = GOLDEN.tensors("model")
    values["model.transformer.ln_f.weight"][:3] = [
        7e4,
        -7e4,
        1 + 2**-8,
    ]  # past float16, and a tie of bfloat16
    with np.errstate(over="ignore"):
        source = write(tmp_path / "source", {name: x.astype(stored) for name, x in values.items()})
    manifest = to_native(source, tmp_path / "native", dtype=asked)
    assert manifest.dtype == asked
    expected, actual = load_params(source, CONFIG, asked), load_params(tmp_path / "native", CONFIG, asked)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    to_hf(tmp_path / "native", tmp_path / "back")
    assert {dtype for dtype, _, _ in tensors_of(tmp_path / "back").values()} == {asked}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_configuration_states_the_type_of_a_cast(tmp_path, key):
    source = write(tmp_path / "source", GOLDEN.tensors("model"), **{key: "float32"})
    to_native(source, tmp_path / "native", dtype="bfloat16")
    values = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "native" / "config.json").read_text()) == values | {key: "bfloat16"}


def test_stacked_tensors_have_one_type(tmp_path):
    tensors = GOLDEN.tensors("model")
    for name in (f"{BLOCK}1.q_proj.weight", "model.transformer.ln_f.weight"):
        tensors[name] = tensors[name].astype(np.float16)
    source = write(tmp_path / "source", tensors)
    with pytest.raises(ConfigError, match=r"several types.*layers\.q \(F16, F32\)$"):
        to_native(source, tmp_path / "native")
    to_native(source, tmp_path / "native", dtype="float32")
    tensors[f"{BLOCK}1.q_proj.weight"] = tensors[f"{BLOCK}0.q_proj.weight"]
    mixed = write(tmp_path / "mixed", tensors)
    to_native(mixed, tmp_path / "kept")
    to_hf(tmp_path / "kept", tmp_path / "back")
    assert tensors_of(tmp_path / "back") == tensors_of(mixed)


# Refusals


def no_trace(target: Path) -> bool:
    return not target.exists() and not target.with_name(f"{target.name}.partial").exists()


def test_an_existing_target_is_refused(tmp_path, source):
    target = tmp_path / "native"
    to_native(source, target)
    before = contents(target)
    with pytest.raises(CheckpointError, match=f"{target} exists.*--overwrite"):
        to_native(source, target, dtype="float32")
    assert contents(target) == before
    to_native(source, target, dtype="float32", overwrite=True)
    assert read_manifest(target).dtype == "float32"
    assert not target.with_name("native.partial").exists()
    compare_checksums(target)
    with pytest.raises(CheckpointError, match="exists"):
        to_hf(target, source)


def test_the_working_directory_is_no_target(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".", "source/.."):
        with pytest.raises(CheckpointError, match="is or contains the source"):
            to_native(source, Path(name))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="empty exists"):
        to_native(source, Path("."))
    to_native(source, Path("native"))
    compare_checksums(tmp_path / "empty" / "native")


def test_only_a_checkpoint_is_overwritten(tmp_path, source):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name in ("home", "file"):
        with pytest.raises(CheckpointError, match=f"{name} is no checkpoint"):
            to_native(source, tmp_path / name, overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_source_is_never_replaced_by_itself(tmp_path, source, overwrite):
    before = contents(source)
    with pytest.raises(CheckpointError, match="is or contains the source"):
        to_native(source, source, overwrite=overwrite)
    with pytest.raises(CheckpointError, match="is or contains the source"):
        to_native(source, source / ".." / "source", overwrite=overwrite)
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match="is or contains the source"):
        to_native(source, tmp_path, overwrite=overwrite)
    assert contents(source) == before


def test_a_source_of_the_wrong_format_is_refused(tmp_path, source):
    to_native(source, tmp_path / "native")
    with pytest.raises(CheckpointError, match="native checkpoint already"):
        to_native(tmp_path / "native", tmp_path / "other")
    with pytest.raises(CheckpointError, match="no native checkpoint"):
        to_hf(source, tmp_path / "other")
    assert no_trace(tmp_path / "other")


@pytest.mark.parametrize("file", ["config.json", "model-00001-of-*", "model.safetensors.index.json"])
def test_an_unreadable_source_is_refused_before_anything_is_written(tmp_path, source, file):
    damaged = next(source.glob(file))
    os.truncate(damaged, 20)
    with pytest.raises(JdllmError, match=damaged.name):
        to_native(source, tmp_path / "native")
    assert no_trace(tmp_path / "native")


def test_a_foreign_directory_under_the_temporary_name_is_kept(tmp_path, source):
    partial = tmp_path / "native.partial"
    partial.mkdir()
    (partial / "mine").touch()
    with pytest.raises(CheckpointError, match=f"{partial} is in the way"):
        to_native(source, tmp_path / "native")
    assert (partial / "mine").exists()


def test_two_conversions_to_one_target_exclude_each_other(tmp_path, source):
    refused = []

    def convert_again(*_: int) -> None:
        with pytest.raises(CheckpointError, match="is being written by another process"):
            to_native(source, tmp_path / "native")
        refused.append(True)

    to_native(source, tmp_path / "native", progress=convert_again)
    assert len(refused) == len(tensors_of(source))
    compare_checksums(tmp_path / "native")


def test_damage_is_not_written_back(tmp_path, source):
    native = tmp_path / "native"
    to_native(source, native)
    chunk = native / "layers.v" / "1.0.0"
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 128
    chunk.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{chunk} \({BLOCK}1.v_proj.weight\) is damaged"):
        to_hf(native, tmp_path / "back")
    assert not (tmp_path / "back").exists()
