"""GGUF files: their weights, and files that are not read."""

import hashlib
import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jdllm import cli
from jdllm.checkpoints.conversion import to_hf, to_native
from jdllm.checkpoints.loading import load_params, read_index, resolve, resolve_dtype
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import CheckpointError, JdllmError
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf, read_config
from tests.checkpoints.gguf_writer import write_gguf
from tests.helpers import GOLDENS, slow

QUANTISED = GOLDENS / "quantised"
RECORDED: dict[str, dict[str, Any]] = json.loads((QUANTISED / "gguf.json").read_text())
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 64, "kv_pool": "1MiB", "progress": False}


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, np.float32).tobytes()).hexdigest()


@pytest.mark.parametrize("family", RECORDED)
def test_values_are_those_of_transformers(family: str):
    """The rows of llama's queries and keys are in another order in the file."""
    index, sums = read_index(QUANTISED / f"{family}.gguf"), RECORDED[family]["sha256"]
    assert {name: sha256(index[name].read(index[name].whole)) for name in sums} == sums


@pytest.mark.parametrize("family", ["llama", slow("qwen2"), slow("qwen3")])
def test_tokens_are_those_of_transformers(family: str):
    recorded = RECORDED[family]
    [length] = {len(tokens) for tokens in recorded["tokens"]}
    exact = {"dtype": "float32", "hf_overrides": {"quantization_config": None}}
    with LLM(QUANTISED / f"{family}.gguf", **exact, **ENGINE) as llm:
        sampling = SamplingParams(max_tokens=length, early_stop=False, temperature=0.0)
        outputs = llm.generate(prompt_token_ids=recorded["prompts"], sampling=sampling)
    assert [output.token_ids for output in outputs] == recorded["tokens"]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16])
@pytest.mark.parametrize("family", ["llada", "llada_moe", "dream", "llama", "mistral", "qwen2"])
def test_a_file_has_the_model_that_it_was_made_from(family: str, kind: Kind, tmp_path: Path):
    source, file, dtype = GOLDENS / family, tmp_path / "model.gguf", f"float{kind.name[1:]}"
    write_gguf(source, file, kind)
    config, original = config_from_hf(file), config_from_hf(source)
    assert resolve_dtype(file, config, "auto") == dtype
    assert (config.mask_id, config.eos_ids) == (original.mask_id, original.eos_ids)
    jax.tree.map(
        np.testing.assert_array_equal, load_params(file, config, dtype), load_params(source, original, dtype)
    )


@pytest.mark.parametrize("family", ["llada", slow("dream")])
def test_a_diffusion_model_generates_what_its_checkpoint_generates(family: str, tmp_path: Path):
    write_gguf(GOLDENS / family, tmp_path / "model.gguf", Kind.F16)
    found = []
    for path in (GOLDENS / family, tmp_path):
        with LLM(path, dtype="float16", **ENGINE) as llm:
            sampling = SamplingParams(gen_length=16, block_length=8, steps=8, early_stop=False)
            [output] = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling=sampling)
            found.append(output.token_ids)
    assert found[0] == found[1]


BLOCKS = [Kind.BF16, Kind.Q8_0, Kind.Q6_K, Kind.Q5_K, Kind.Q5_1, Kind.Q5_0, Kind.Q4_K, Kind.Q4_1, Kind.Q4_0]
BLOCKS += [Kind.Q3_K, Kind.Q2_K, Kind.IQ4_NL, Kind.IQ4_XS]


def drawn_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Bytes of any matrix of a kind, all of whose scales are finite: no half has the highest exponent bit."""
    size, length = gguf.GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(kind.value).integers(0, 256, (rows, columns // size * length), np.uint8)
    drawn[:, 1::2] &= 0xBF
    return drawn & (0xFF if length % 2 == 0 else 0xBF)


def write_matrix(path: Path, kind: Kind, values: np.ndarray) -> Path:
    """A model of one layer, whose projection of queries has these bytes."""
    width = 256
    config = json.loads((GOLDENS / "llama" / "config.json").read_text())
    config |= {"hidden_size": width, "num_hidden_layers": 1, "vocab_size": 8, "num_attention_heads": 4}
    config |= {"head_dim": 64, "intermediate_size": 8, "num_key_value_heads": 4}
    shapes = {"self_attn.k_proj": (width, width), "self_attn.v_proj": (width, width)}
    shapes |= {"self_attn.o_proj": (width, width), "mlp.gate_proj": (8, width), "mlp.up_proj": (8, width)}
    shapes |= {"mlp.down_proj": (width, 8), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    tensors = {f"model.layers.0.{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    tensors |= {"model.norm.weight": np.ones(width, np.float32)}
    tensors |= {"model.embed_tokens.weight": np.ones((8, width), np.float32)}
    source = path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / "model.safetensors")
    write_gguf(source, path / "model.gguf", raw={"blk.0.attn_q.weight": (values, kind)})
    return path / "model.gguf"


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_decoded_as_the_package_decodes_them(kind: Kind, tmp_path: Path):
    blocks = drawn_blocks(kind, 256, 256)
    values = gguf.dequantize(blocks, kind)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 8
    file = write_matrix(tmp_path, kind, blocks)
    stored = read_index(file)["model.layers.0.self_attn.q_proj.weight"]
    # Row r of a head of 64: neighbours of the file are 32 apart.
    order = [64 * head + 2 * (row % 32) + row // 32 for head in range(4) for row in range(64)]
    np.testing.assert_array_equal(stored.read(stored.whole), values[order])
    np.testing.assert_array_equal(stored.read([range(70, 200), range(3, 250)]), values[order][70:200, 3:250])
    np.testing.assert_array_equal(
        stored.rows(100, 20).read([range(5, 20), range(256)]), values[order][105:120]
    )
    config = config_from_hf(file)
    with np.errstate(over="ignore"):
        expected = values[order].astype(jax.numpy.bfloat16)
    loaded = load_params(file, config, "bfloat16")["layers"]["q"][0]
    np.testing.assert_array_equal(np.asarray(loaded), expected)


def test_each_expert_has_its_rows_of_a_quantised_tensor(tmp_path: Path):
    kinds = {"ffn_gate_exps.weight": Kind.Q8_0, "ffn_up_exps.weight": Kind.Q4_0}
    write_gguf(GOLDENS / "llada_moe", tmp_path / "model.gguf", kinds)
    index, original = read_index(tmp_path / "model.gguf"), load_file(GOLDENS / "llada_moe/model.safetensors")
    for expert in range(8):
        for part, kind in (("gate", Kind.Q8_0), ("up", Kind.Q4_0)):
            name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
            expected = gguf.dequantize(gguf.quantize(original[name], kind), kind)
            np.testing.assert_array_equal(index[name].read(index[name].whole), expected)


def test_a_quantised_file_is_loaded_in_bfloat16(tmp_path: Path):
    write_gguf(GOLDENS / "qwen2", tmp_path / "model.gguf", {"weight": Kind.Q4_0})
    file = tmp_path / "model.gguf"
    assert resolve_dtype(file, config_from_hf(file), "auto") == "bfloat16"


def test_an_adapter_is_merged_as_into_the_checkpoint(tmp_path: Path):
    """Into queries and keys too, whose rows are in another order in the file."""
    source, file, adapter = GOLDENS / "llama", tmp_path / "model.gguf", GOLDENS / "lora" / "linear"
    write_gguf(source, file)
    params, expected = (
        load_params(path, config_from_hf(path), "float32", adapter=adapter) for path in (file, source)
    )
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    plain = load_params(source, config_from_hf(source), "float32")["layers"]
    assert all((params["layers"][name] != plain[name]).any() for name in ("q", "k"))


def test_the_files_of_a_split_are_one_model(tmp_path: Path):
    write_gguf(GOLDENS / "llama", tmp_path / "model.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert resolve(tmp_path) == parts[0]
    original = config_from_hf(GOLDENS / "llama")
    expected = load_params(GOLDENS / "llama", original, "float32")
    for part in (parts[0], parts[2]):
        params = load_params(part, config_from_hf(part), "float32")
        jax.tree.map(np.testing.assert_array_equal, params, expected)
    alone = tmp_path / "alone.gguf"
    shutil.copy(parts[0], alone)
    with pytest.raises(CheckpointError, match=r"alone.gguf is one of 3 files.*-00001-of-00003.gguf"):
        read_config(alone)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.gguf"):
        read_config(parts[0])


def test_other_weights_of_a_directory_go_before_a_gguf_file(tmp_path: Path):
    path = Path(shutil.copytree(GOLDENS / "qwen2", tmp_path / "both"))
    shutil.copy(QUANTISED / "llama.gguf", path)
    assert resolve(path) == path
    (path / "model.safetensors").unlink()
    assert resolve(path) == path / "llama.gguf"
    shutil.copy(QUANTISED / "qwen2.gguf", path)
    with pytest.raises(CheckpointError, match=r"several GGUF files: give one of llama.gguf, qwen2.gguf"):
        resolve(path)


def test_a_file_is_converted_to_the_type_that_it_is_loaded_in(tmp_path: Path):
    file, native, hf = QUANTISED / "llama.gguf", tmp_path / "native", tmp_path / "hf"
    config = config_from_hf(file)
    expected = load_params(file, config, "bfloat16")
    to_native(file, native)
    to_hf(native, hf)
    assert {x.dtype for x in load_file(hf / "model.safetensors").values()} == {np.dtype(jax.numpy.bfloat16)}
    for path in (native, hf):
        assert config_from_hf(path) == config
        jax.tree.map(np.testing.assert_array_equal, load_params(path, config, "bfloat16"), expected)


@pytest.mark.parametrize(
    ("name", "value", "kind", "told"),
    [
        ("rope_freqs.weight", np.full(8, 2.5, np.float32), Kind.F32, r"has rope_freqs.weight, whose values"),
        (
            "blk.0.attn_q.bias",
            np.ones(64, np.float32),
            Kind.F32,
            r"unknown: .*layers.0.self_attn.q_proj.bias",
        ),
        ("blk.1.attn_sinks.weight", np.ones(4, np.float32), Kind.F32, r"unknown: blk.1.attn_sinks.weight"),
        ("output.weight", np.ones((512, 64), np.int32), Kind.I32, r"another type.*lm_head.weight is I32"),
    ],
)
def test_tensors_that_are_not_followed_are_refused_by_name(
    name: str, value: np.ndarray, kind: Kind, told: str, tmp_path: Path
):
    write_gguf(GOLDENS / "llama", tmp_path / "model.gguf", raw={name: (value, kind)})
    with pytest.raises(JdllmError, match=told):
        load_params(tmp_path / "model.gguf", config_from_hf(tmp_path / "model.gguf"), "float32")


def header(version: int, order: str = "<") -> bytes:
    return b"GGUF" + struct.pack(f"{order}I", version) + bytes(64)


Spoil = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda data: data[:-1000], "model.gguf is damaged or truncated"),
        (lambda data: data[:300], "model.gguf is damaged or truncated"),
        (lambda data: data[:6], "is no GGUF file"),
        (lambda data: b"nothing of this kind", "is no GGUF file"),
        (lambda data: header(1), "of version 1: jdllm reads versions 2 and 3"),
        (lambda data: header(3, ">"), "in big-endian order"),
        (
            lambda data: data.replace(b"llama", b"bloom"),
            "the architecture 'bloom': .* jdllm runs llama, qwen2",
        ),
        (lambda data: data.replace(b"llama.embedding", b"other.embedding"), "lacks llama.embedding_length"),
        (
            lambda data: data.replace(b"token_embd.weight", b"token_embx.weight"),
            "lacks the tensor token_embd",
        ),
    ],
)
def test_a_damaged_or_unknown_file_is_named(spoil: Spoil, told: str, tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.write_bytes(spoil((QUANTISED / "llama.gguf").read_bytes()))
    with pytest.raises(JdllmError, match=told) as refused:
        config_from_hf(resolve(file))
    assert "\n" not in str(refused.value)


def test_a_type_of_tensors_that_the_package_does_not_know_is_refused(tmp_path: Path):
    file, told = tmp_path / "model.gguf", b"output_norm.weight" + struct.pack("<IQ", 1, 64)
    data = (QUANTISED / "llama.gguf").read_bytes()
    assert told + struct.pack("<I", Kind.F32) in data
    file.write_bytes(data.replace(told + struct.pack("<I", Kind.F32), told + struct.pack("<I", 199)))
    with pytest.raises(CheckpointError, match=r"unknown to the package gguf: .*199.* is not a valid"):
        config_from_hf(file)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copy(QUANTISED / "llama.gguf", tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"needs the package gguf: .*jdllm\[gguf\]"):
        config_from_hf(tmp_path / "llama.gguf")


def test_commands_take_a_file(tmp_path: Path):
    file = QUANTISED / "llama.gguf"
    planned = CliRunner().invoke(cli.app, ["plan", str(file), "--context", "64"])
    assert (planned.exit_code, "184.62 KiB" in planned.stdout) == (0, True)
    converted = CliRunner().invoke(cli.app, ["convert", str(file), str(tmp_path / "native")])
    assert (converted.exit_code, "20 tensors, 189,056 bytes" in converted.stdout) == (0, True)


@pytest.mark.slow
def test_the_command_line_generates_from_a_file():
    recorded = RECORDED["qwen2"]
    asked = [
        "generate",
        "--model",
        str(QUANTISED / "qwen2.gguf"),
        "--token-ids",
        json.dumps(recorded["prompts"][:1]),
    ]
    result = CliRunner().invoke(cli.app, [*asked, "--dtype", "float32", "--max-tokens", "12"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == recorded["tokens"][0]
