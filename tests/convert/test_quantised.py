"""`jdllm convert --quantize`: what is stored is what a load would have rounded, and stays so."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from jdllm import cli
from jdllm.checkpoints import loading, rounded
from jdllm.checkpoints.conversion import to_hf, to_native
from jdllm.checkpoints.loading import load_params, read_index
from jdllm.checkpoints.native import compare_checksums, read_manifest
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import CheckpointError, ConfigError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import param_bytes
from jdllm.quantised import Quantised, WeightForm, in_order
from tests.convert.helpers import contents
from tests.helpers import GOLDENS, slow

LLAMA = GOLDENS / "llama"
UP = "model.layers.1.mlp.up_proj.weight"
"""Has the chunks `layers.up.values/1.0.0` and `layers.up.scales/1.0`."""
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 128, "kv_pool": "1MiB", "progress": False}
MASKS = SamplingParams(gen_length=16, steps=8)
SAMPLING = {"llama": SamplingParams(max_tokens=12), "llada": MASKS, "llada_moe": MASKS}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("quantised") / "llama"
    to_native(LLAMA, target, quantize="int8")
    return target


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def numbers_of(native: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Numbers and scales of the matrices, as the manifest and the files say."""
    found = {t.name: np.fromfile(native / t.chunk, np.uint8) for t in read_manifest(native).tensors}
    shapes = {t.name: t.shape for t in read_manifest(native).tensors if t.dtype == "I8"}
    return {
        name: (found[name].view(np.int8).reshape(shape), found[f"{name}_scale"].view(np.float32))
        for name, shape in shapes.items()
    }


def assert_loads_alike(
    native: Path, source: Path, dtype: str, form: WeightForm = "int8", **options: Any
) -> None:
    config = config_from_hf(source).quantised(form)
    expected = load_params(source, config, dtype, **options)
    found = load_params(native, config, dtype)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(map(str, args)))
    return result.exit_code, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("family", "dtype", "at_once", "form"),
    [
        ("llama", "auto", 1 << 20, "int8"),
        ("llama", "bfloat16", 1 << 9, "int8"),
        ("llama", "bfloat16", 1 << 9, "int4"),
        ("llama", "bfloat16", 1 << 9, "uint4"),
        ("llama", "bfloat16", 1 << 9, "fp8"),
        ("llada", "float32", 1 << 9, "int8"),
        ("qwen2", "float16", 1 << 20, "int8"),
        ("qwen2", "float16", 1 << 20, "int4"),
        ("llada_moe", "bfloat16", 1 << 9, "int4"),
        slow("llada_moe", "bfloat16", 1 << 9, "int8"),
        slow("llada2", "bfloat16", 1 << 9, "int4"),
        slow("llada2", "float32", 1 << 20, "fp8"),
    ],
)
def test_weights_are_those_of_a_load_that_rounds(family, dtype, at_once, form, tmp_path, monkeypatch):
    monkeypatch.setattr(rounded, "AT_ONCE", at_once)
    monkeypatch.setattr(loading, "PIECE_BYTES", 2 * at_once)
    source, native = GOLDENS / family, tmp_path / "native"
    manifest = to_native(source, native, dtype=dtype, quantize=form)
    assert read_manifest(native) == manifest
    assert manifest.dtype == ("float32" if dtype == "auto" else dtype)
    assert manifest.bytes == param_bytes(config_from_hf(source).quantised(form), manifest.dtype)
    assert_loads_alike(native, source, manifest.dtype, form)


def test_numbers_are_the_nearest_ones_and_in_the_order_of_inputs(converted):
    tensors = load_file(LLAMA / "model.safetensors")
    stored = numbers_of(converted)
    assert stored.keys() == {name for name, x in tensors.items() if x.ndim == 2 and ".layers." in name}
    for name, (values, scales) in stored.items():
        np.testing.assert_allclose(scales, np.abs(tensors[name]).max(axis=1) / 127, rtol=1e-6)
        assert (np.abs(values).max(axis=1) == 127).all()
        off = np.abs(values * scales[:, None] - tensors[name])
        assert (off <= scales[:, None] * 0.50001).all()
    halves = sum(tensors[name].nbytes // 2 for name in stored)
    assert sum(values.nbytes + scales.nbytes for values, scales in stored.values()) < 0.6 * halves


def test_stored_numbers_are_loaded_as_they_are(copy):
    """Rounding a matrix again would make 127 of its largest number."""
    values = np.random.default_rng(0).integers(-50, 51, (160, 64)).astype(np.int8)
    scales = np.linspace(1, 2, 160, dtype=np.float32)
    values.tofile(copy / "layers.up.values" / "1.0.0")
    scales.tofile(copy / "layers.up.scales" / "1.0")
    read: list[int] = []
    config = config_from_hf(copy).quantised("int8")
    params = load_params(copy, config, "float32", progress=lambda part, _: read.append(part))
    up = params["layers"]["up"]
    assert isinstance(up, Quantised)
    np.testing.assert_array_equal(in_order(up.values)[1], values)
    np.testing.assert_array_equal(up.scales[1], scales)
    assert max(read) == read_manifest(copy).bytes


@pytest.mark.parametrize(
    ("family", "form"),
    [("llada", None), slow("llama", "int8"), slow("llama", None), slow("llada_moe", None)],
)
def test_a_model_runs_as_one_that_is_rounded_while_it_is_loaded(family, form, tmp_path):
    to_native(GOLDENS / family, tmp_path / "native", quantize="int8")
    found = []
    for path, given in ((GOLDENS / family, "int8"), (tmp_path / "native", form)):
        with LLM(path, quantization=given, **ENGINE) as llm:
            assert llm.config.quantization == "int8"
            outputs = llm.generate(prompt_token_ids=[[5, 6, 7], [20, 21]], sampling=SAMPLING[family])
            found.append(([out.token_ids for out in outputs], llm.account.weights))
    assert found[0] == found[1]


def test_the_way_back_writes_what_the_numbers_stand_for(converted, tmp_path):
    manifest = to_hf(converted, tmp_path / "back")
    tensors, found = (load_file(path / "model.safetensors") for path in (LLAMA, tmp_path / "back"))
    stored = numbers_of(converted)
    expected = {
        name: stored[name][0] * stored[name][1][:, None] if name in stored else x
        for name, x in tensors.items()
    }
    assert list(found) == list(tensors)
    for name, x in found.items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, expected[name])
    config = json.loads((LLAMA / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert manifest.bytes == sum(x.nbytes for x in found.values())


def test_orbax_restores_numbers_and_scales(converted):
    with ocp.StandardCheckpointer() as reader:
        up = reader.restore(converted)["layers"]["up"]
    values, scales = numbers_of(converted)[UP]
    assert (up["values"].dtype, up["scales"].dtype) == (np.int8, np.float32)
    np.testing.assert_array_equal(up["values"][1], values)
    np.testing.assert_array_equal(up["scales"][1], scales)


@pytest.mark.parametrize("name", ["llama.gguf", "gptq", "awq", "ao_int8"])
def test_quantised_sources(name, tmp_path):
    source = GOLDENS / "quantised" / name
    manifest = to_native(source, tmp_path / "native", quantize="int8")
    assert_loads_alike(tmp_path / "native", source, manifest.dtype)


def test_an_adapter_is_merged_before_rounding(tmp_path):
    adapter = GOLDENS / "lora" / "linear"
    told = run("convert", LLAMA, tmp_path / "native", "--adapter", adapter, "--quantize", "int8")
    assert told == (0, f"{tmp_path / 'native'}: 35 tensors, 354,048 bytes\n")
    assert_loads_alike(tmp_path / "native", LLAMA, "float32", adapter=adapter)


def test_an_adapter_is_merged_into_what_the_numbers_stand_for(converted, tmp_path):
    adapter, config = GOLDENS / "lora" / "linear", config_from_hf(LLAMA).quantised("int8")
    to_hf(converted, tmp_path / "back")
    found, expected = (
        load_params(path, config, "float32", adapter=adapter) for path in (converted, tmp_path / "back")
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_transformer_has_plain_weights(converted, tmp_path):
    to_hf(converted, tmp_path / "back")
    model, plain = (Transformer.from_pretrained(path) for path in (converted, tmp_path / "back"))
    jax.tree.map(np.testing.assert_array_equal, model.params(), plain.params())
    model.save_pretrained(tmp_path / "saved")
    saved, expected = (contents(tmp_path / name) for name in ("saved", "back"))
    assert json.loads(saved["config.json"]) == json.loads(expected["config.json"])


def assert_planned(native: Path) -> None:
    code, told = run("plan", native, "--context", "64", "--memory", "2GiB", "--target", "h200", "--json")
    assert code == 0
    assert json.loads(told)["weights_bytes"] == read_manifest(native).bytes


def test_a_plan_counts_the_bytes_of_the_file(converted):
    assert_planned(converted)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_a_plan_of_experts_counts_the_bytes_of_the_file(form, tmp_path):
    to_native(GOLDENS / "llada2", tmp_path / "native", quantize=form)
    assert_planned(tmp_path / "native")


@pytest.mark.parametrize(("family", "form"), [("llama", "int8"), ("llama", "int4"), slow("llada2", "int8")])
def test_a_native_source_gives_what_the_original_gives(family, form, tmp_path):
    """Byte by byte, and names and files of the way back are those of the original."""
    to_native(GOLDENS / family, tmp_path / "plain")
    assert run("convert", tmp_path / "plain", tmp_path / "found", "--quantize", form)[0] == 0
    to_native(GOLDENS / family, tmp_path / "expected", quantize=form)
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")


def test_an_interrupted_conversion_continues(converted, tmp_path):
    """The first run ends in the middle of the layers. The second one keeps what is complete."""

    def stop(done: int, of: int) -> None:
        if done > 0.8 * of:
            raise KeyboardInterrupt

    target, partial = tmp_path / "llama", tmp_path / "llama.partial"
    with pytest.raises(KeyboardInterrupt):
        to_native(LLAMA, target, quantize="int8", progress=stop)
    first = partial / "layers.down.values" / "0.0.0"
    written = first.stat().st_ino, first.stat().st_mtime_ns
    to_native(LLAMA, target, quantize="int8")
    kept = target / "layers.down.values" / "0.0.0"
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == written
    assert contents(target) == contents(converted)


# Refusals


def change_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def load(path: Path) -> None:
    load_params(path, config_from_hf(path).quantised("int8"), "float32")


def test_what_has_no_such_form(tmp_path, converted):
    for arguments, said in (
        (
            [LLAMA, tmp_path / "x", "--quantize", "int3"],
            "--quantize is 'int3', expected int8 or int4 or uint4 or fp8",
        ),
        ([converted, tmp_path / "x", "--quantize", "int8"], "with matrices in few bits"),
        ([converted, tmp_path / "x", "--quantize", "int8", "--to", "hf"], "on the way to native only"),
        ([converted, "--verify", "--quantize", "int8"], "on the way to native only"),
    ):
        code, told = run("convert", *arguments)
        assert (code, told.count("\n")) == (2, 1)
        assert said in told
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="which is for one device, and devices is 2"):
        LLM(converted, devices=2, progress=False)


def test_damage_is_found(copy, tmp_path):
    scales = copy / "layers.up.scales" / "1.0"
    content = bytearray(scales.read_bytes())
    content[0] ^= 1
    scales.write_bytes(content)
    for read in (compare_checksums, lambda path: to_hf(path, tmp_path / "back")):
        with pytest.raises(
            CheckpointError, match=rf"checksums differ for {UP}_scale in layers.up.scales/1\.0$"
        ):
            read(copy)
    os.truncate(copy / "layers.up.values" / "1.0.0", 100)
    with pytest.raises(CheckpointError, match=rf"mis-sized chunks: layers.up.values/1\.0\.0 \({UP}\)$"):
        load(copy)


def drop_scales(values: dict[str, Any]) -> None:
    values["tensors"] = [entry for entry in values["tensors"] if entry["name"] != f"{UP}_scale"]


def other_scales(values: dict[str, Any]) -> None:
    next(entry for entry in values["tensors"] if entry["name"] == f"{UP}_scale")["shape"] = [80, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop_scales, r"is I8 \[160, 64\] and its scales are none: expected a matrix, and F32 for each row"),
        (other_scales, r"is I8 \[160, 64\] and its scales are F32 \[80, 2\]: expected"),
        (lambda values: values.update(version=1), r"no manifest of a native checkpoint: .*is I8 \(64, 160\)"),
        (
            lambda values: values.update(dtype="int4"),
            "no manifest of a native checkpoint: .*its dtype is 'int4'",
        ),
    ],
)
def test_a_manifest_that_does_not_fit(copy, change, said):
    assert json.loads((copy / "manifest.json").read_text())["version"] == 2
    change_json(copy / "manifest.json", change)
    with pytest.raises(CheckpointError, match=said):
        load(copy)


def test_a_configuration_of_another_checkpoint(copy, tmp_path):
    to_native(LLAMA, tmp_path / "plain")
    for path, other, said in (
        (copy, LLAMA, "says nothing of matrices in few bits"),
        (tmp_path / "plain", copy, "tells of matrices in int8"),
    ):
        kept = (path / "config.json").read_bytes()
        shutil.copyfile(other / "config.json", path / "config.json")
        with pytest.raises(CheckpointError, match=rf"{path / 'config.json'} {said}.*manifest.json: one of"):
            load(path)
        (path / "config.json").write_bytes(kept)
    plain = Path(shutil.copytree(LLAMA, tmp_path / "hf"))
    shutil.copyfile(copy / "config.json", plain / "config.json")
    with pytest.raises(CheckpointError, match=r"quant_method jdllm.*is for native checkpoints"):
        read_index(plain)
    change_json(copy / "config.json", lambda values: values["quantization_config"].update(format="int2"))
    with pytest.raises(ConfigError, match=r"quant_method jdllm, format int2.*cannot be loaded"):
        LLM(copy, progress=False)
