"""GGUF files whose numbers of 4 bits go to the device as they are."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jdllm import cli
from jdllm.checkpoints.default_form import DefaultForm, default_form
from jdllm.checkpoints.loading import load_params, read_index
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf, read_config
from jdllm.models.weights import param_bytes
from jdllm.quantised import Quantised, Shifted
from tests.checkpoints.gguf_writer import write_gguf
from tests.checkpoints.test_gguf import drawn_blocks, write_matrix
from tests.helpers import GOLDENS

ENGINE: dict[str, Any] = {"max_num_batched_tokens": 64, "kv_pool": "1MiB", "progress": False}
F32 = jnp.dtype("float32")
MIXED = {"blk.0.attn_v.weight": Kind.Q8_0, "blk.1.ffn_down.weight": Kind.Q5_0, "token_embd.weight": Kind.F16}
MIXED |= {"blk.1.attn_v.weight": Kind.Q4_1, "weight": Kind.Q4_0}
"""As in a file of Q4_K_M, some layers have more bits in `v` and in `down`."""


def form_of(path: Path, adapter: Path | None = None) -> DefaultForm:
    return default_form(path, config_from_hf(path), read_config(path), adapter)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mixed") / "model.gguf"
    write_gguf(GOLDENS / "llada", file, MIXED)
    return file


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K])
def test_numbers_are_those_of_the_blocks(kind: Kind, tmp_path: Path):
    """Scales and offsets are rounded to bfloat16. Rows come in the order of Hugging Face."""
    blocks = drawn_blocks(kind, 256, 256)
    stored = read_index(write_matrix(tmp_path, kind, blocks))["model.layers.0.self_attn.q_proj.weight"]
    order = [64 * head + 2 * (row % 32) + row // 32 for head in range(4) for row in range(64)]
    numbers = stored.rows(20, 200).numbers_in("uint4")
    assert numbers is not None
    values, scales, offsets = (part.read(part.whole) for part in numbers.parts)
    found = Shifted.of_stored(*map(jnp.asarray, (values, scales, offsets))).dequantised(F32)
    exact = gguf.dequantize(blocks, kind)[order][20:220]
    sizes = (8 * np.abs(scales.astype(np.float32)) + np.abs(offsets.astype(np.float32))).repeat(32, axis=1)
    assert (np.abs(np.asarray(found) - exact) <= sizes * 2**-8).all()
    assert len(np.unique(values)) > 200


def test_leaves_with_more_bits_are_rounded_to_int8(mixed: Path):
    assert form_of(mixed) == DefaultForm("uint4", ("down", "v"))
    config, file = config_from_hf(mixed).quantised(*form_of(mixed)), GOLDENS / "llada" / "model.safetensors"
    original = load_file(file)
    layers = load_params(mixed, config, "bfloat16")["layers"]
    for leaf, name, kinds in (
        ("v", "v_proj", (Kind.Q8_0, Kind.Q4_1)),
        ("down", "ff_out", (Kind.Q4_0, Kind.Q5_0)),
        ("gate", "ff_proj", (Kind.Q4_0, Kind.Q4_0)),
        ("q", "q_proj", (Kind.Q4_0, Kind.Q4_0)),
    ):
        assert type(layers[leaf]) is (Quantised if leaf in ("v", "down") else Shifted)
        values = np.asarray(layers[leaf].dequantised(F32))
        for layer, kind in enumerate(kinds):
            matrix = original[f"model.transformer.blocks.{layer}.{name}.weight"]
            exact = gguf.dequantize(gguf.quantize(matrix, kind), kind)
            most = np.abs(exact).max(axis=1, keepdims=True)
            assert (np.abs(values[layer] - exact) <= most / 100).all()


def test_all_in_4_bits_by_an_option(mixed: Path):
    layers = load_params(mixed, config_from_hf(mixed).quantised("uint4"), "bfloat16")["layers"]
    assert {type(layers[leaf]) for leaf in ("q", "v", "down")} == {Shifted}


def test_files_that_stay_in_16_bits(mixed: Path, tmp_path: Path):
    """Nothing in 4 bits, one matrix in 16 bits, an adapter, and a configuration that asks for 16 bits."""
    for name, kinds in (
        ("8 bits", {"weight": Kind.Q8_0}),
        ("one matrix", {"blk.0.attn_q.weight": Kind.F16, "weight": Kind.Q4_0}),
    ):
        write_gguf(GOLDENS / "llama", tmp_path / f"{name}.gguf", kinds)
        assert form_of(tmp_path / f"{name}.gguf") == DefaultForm(None)
    write_gguf(GOLDENS / "llama", tmp_path / "4 bits.gguf", {"weight": Kind.Q4_0})
    assert form_of(tmp_path / "4 bits.gguf") == DefaultForm("uint4")
    assert form_of(tmp_path / "4 bits.gguf", GOLDENS / "lora" / "linear") == DefaultForm(None)
    values = read_config(mixed) | {"quantization_config": None}
    assert default_form(mixed, config_from_hf(mixed), values) == DefaultForm(None)


def test_a_plan_counts_what_is_kept(mixed: Path):
    asked = ["plan", str(mixed), "--context", "64", "--no-check", "--json", "--memory", "2GiB"]
    planned = json.loads(CliRunner().invoke(cli.app, asked).stdout)
    config = config_from_hf(mixed).quantised("uint4", ("down", "v"))
    assert planned["weights_bytes"] == param_bytes(config, "bfloat16")


@pytest.mark.slow
def test_tokens_are_those_of_the_kept_values(mixed: Path, tmp_path: Path):
    """The same model with what the device keeps, in float32."""
    config = config_from_hf(mixed).quantised(*form_of(mixed))
    params, source = load_params(mixed, config, "float32"), GOLDENS / "llada"
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "attn_out"}
    names |= {"gate": "ff_proj", "up": "up_proj", "down": "ff_out"}
    tensors = load_file(source / "model.safetensors")
    for leaf, name in names.items():
        for layer, matrix in enumerate(np.asarray(params["layers"][leaf].dequantised(F32))):
            tensors[f"model.transformer.blocks.{layer}.{name}.weight"] = matrix
    tensors["model.transformer.wte.weight"] = np.asarray(params["embed"])
    tensors["model.transformer.ff_out.weight"] = np.asarray(params["head"])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    found = []
    for path in (mixed, tmp_path):
        with LLM(path, dtype="float32", **ENGINE) as llm:
            sampling = SamplingParams(gen_length=16, block_length=8, steps=8, early_stop=False)
            [output] = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling=sampling)
            found.append((output.token_ids, llm.account.weights))
    assert found[0][0] == found[1][0]
    assert found[0][1] == param_bytes(config, "float32") < found[1][1]
