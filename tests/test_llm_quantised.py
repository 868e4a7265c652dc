"""`LLM(quantization=...)`: what comes out equals a model whose matrices are what the numbers stand for."""

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.random_checkpoint import write_random_checkpoint
from jdllm.checkpoints import loading
from jdllm.checkpoints.loading import load_params
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import is_spec, param_bytes, spec_tree, tree_bytes
from jdllm.quantised import Quantised, Shifted, WeightForm
from tests.helpers import GOLDENS, slow
from tests.rounding import (
    rounded_to_4_bits,
    rounded_to_4_bits_with_offsets,
    rounded_to_8_bits,
    rounded_to_floats_of_8_bits,
)

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 128,
    "kv_pool": "1MiB",
    "progress": False,
}
PROMPTS = [[5, 6, 7, 9, 11, 12, 13], [20, 21, 22]]
LLAMA = GOLDENS / "llama"
MODELS = {
    "llada": {"gen_length": 16, "block_length": 8, "steps": 8},
    "dream": {"gen_length": 16, "steps": 8, "cache": "dual", "block_length": 8},
    "llama": {"max_tokens": 12},
    "sdar": {"gen_length": 16, "steps": 8},
    "llada_moe": {"gen_length": 16, "block_length": 8, "steps": 8},
    "llada2": {"gen_length": 16, "steps": 8},
}
MASK = {"llada2": {"mask_token_id": 511}}
"""Where `config.json` states none."""


ROUNDED = {
    "int8": rounded_to_8_bits,
    "int4": rounded_to_4_bits,
    "uint4": rounded_to_4_bits_with_offsets,
    "fp8": rounded_to_floats_of_8_bits,
}


def with_forms(cases: Iterable[Any]) -> list[Any]:
    """Each case in each form. Experts of these models have no multiple of 32 inputs."""
    found = []
    for case, form in itertools.product(cases, ROUNDED):
        name, *more, marks = (*case.values, case.marks) if hasattr(case, "marks") else (case, ())
        if form != "uint4" or name not in ("llada_moe", "llada2"):
            found.append(pytest.param(name, *more, form, marks=marks))
    return found


def with_rounded_matrices(source: Path, tmp_path: Path, form: WeightForm) -> Path:
    """The same checkpoint with rounded matrices in layers; routers stay."""
    target = shutil.copytree(source, tmp_path / "rounded", copy_function=shutil.copyfile)
    file = target / "model.safetensors"
    tensors = load_file(file)
    in_layers = {
        name
        for name, x in tensors.items()
        if x.ndim == 2 and re.search(r"\.(layers|blocks)\.(?!.*mlp\.gate\.weight)", name)
    }
    save_file({name: ROUNDED[form](x) if name in in_layers else x for name, x in tensors.items()}, file)
    return target


def tokens_of(model: Any, sampling: SamplingParams, **options: Any) -> list[list[int]]:
    with LLM(model, **SMALL, **options) as llm:
        return [list(out.token_ids) for out in llm.generate(prompt_token_ids=PROMPTS, sampling=sampling)]


@pytest.mark.parametrize(("name", "form"), with_forms(["llada", *map(slow, list(MODELS)[1:])]))
def test_tokens_are_those_of_the_rounded_model(name: str, form: WeightForm, tmp_path: Path):
    source, sampling = GOLDENS / name, SamplingParams(**MODELS[name])
    kept = tokens_of(source, sampling, quantization=form, hf_overrides=MASK.get(name))
    rounded = with_rounded_matrices(source, tmp_path, form)
    assert kept == tokens_of(rounded, sampling, hf_overrides=MASK.get(name))


@pytest.mark.parametrize(("name", "form"), with_forms(["llama", slow("llada_moe")]))
def test_a_transformer_is_quantised_like_its_checkpoint(name: str, form: WeightForm):
    source, sampling = GOLDENS / name, SamplingParams(**MODELS[name])
    module = Transformer.from_pretrained(source, dtype="float32")
    options = {name: value for name, value in SMALL.items() if name != "dtype"}
    with LLM(module, **options, quantization=form) as llm:
        found = [list(out.token_ids) for out in llm.generate(prompt_token_ids=PROMPTS, sampling=sampling)]
    assert found == tokens_of(source, sampling, quantization=form)


@pytest.mark.parametrize(
    ("name", "piece_bytes", "form"),
    with_forms(
        pytest.param(*case) for case in [("llama", 1 << 12), ("llama", 1 << 20), ("llada_moe", 1 << 12)]
    ),
)
def test_matrices_are_rounded_as_they_are_loaded(
    name: str, piece_bytes: int, form: WeightForm, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loading, "PIECE_BYTES", piece_bytes)
    source, plain = GOLDENS / name, config_from_hf(GOLDENS / name)
    config = plain.quantised(form)
    params, kept = load_params(source, plain, "float32"), load_params(source, config, "bfloat16")
    assert tree_bytes(kept) == param_bytes(config, "bfloat16") < param_bytes(plain, "bfloat16")

    def check(path: Any, spec: Any, weight: jax.Array, found: Any) -> None:
        matrix = path[0].key in ("layers", "dense_layers") and weight.ndim > 2 and path[1].key != "router"
        assert isinstance(found, Quantised) == matrix
        if isinstance(found, Quantised):
            published = np.asarray(weight.mT if path[1].key.startswith("experts_") else weight)
            exact = np.stack([ROUNDED[form](one) for one in published.reshape(-1, *published.shape[-2:])])
            values = found.dequantised(jnp.dtype("float32"))
            np.testing.assert_allclose(values, exact.reshape(published.shape), rtol=1e-6, atol=1e-7)
        else:
            assert found.dtype == jnp.bfloat16

    jax.tree.map_with_path(check, spec_tree(config), params, kept, is_leaf=is_spec)


def test_experts_have_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In stacks of experts, which are rounded in pieces."""
    monkeypatch.setattr(loading, "PIECE_BYTES", 1 << 12)
    values = json.loads((GOLDENS / "llada_moe" / "config.json").read_text()) | {"torch_dtype": "float32"}
    source = write_random_checkpoint(tmp_path / "moe", values | {"expert_intermediate_size": 32})
    tensors = load_file(source / "model.safetensors")
    params = load_params(source, config_from_hf(source).quantised("uint4"), "float32")
    down = params["layers"]["experts_down"]
    assert isinstance(down, Shifted)
    found = np.asarray(down.dequantised(jnp.dtype("float32")))
    for layer, expert in np.ndindex(found.shape[:2]):
        matrix = tensors[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"]
        expected = rounded_to_4_bits_with_offsets(matrix)
        np.testing.assert_allclose(found[layer, expert], expected, rtol=1e-6, atol=1e-7)


class TestRefusals:
    def test_several_cards(self):
        config = dataclasses.replace(config_from_hf(LLAMA), cards=2)
        with pytest.raises(ConfigError, match="which is for one device, and devices is 2"):
            config.quantised("int8")

    def test_an_odd_number_of_inputs(self):
        config = dataclasses.replace(config_from_hf(LLAMA), intermediate_size=161)
        assert config.quantised("int8").quantization == "int8"
        with pytest.raises(
            ConfigError, match="for numbers of inputs that are multiples of 2, and intermediate_size is 161"
        ):
            config.quantised("int4")

    def test_an_odd_number_of_inputs_of_experts(self):
        config = config_from_hf(GOLDENS / "llada_moe")
        assert config.moe is not None
        odd = dataclasses.replace(config, moe=dataclasses.replace(config.moe, expert_size=27))
        with pytest.raises(
            ConfigError, match="for numbers of inputs that are multiples of 2, and expert_size is 27"
        ):
            odd.quantised("int4")
        unused = dataclasses.replace(config, intermediate_size=161)
        assert unused.quantised("int4").quantization == "int4"

    def test_inputs_that_are_no_whole_groups(self):
        config = config_from_hf(GOLDENS / "llada_moe")
        with pytest.raises(ConfigError, match="inputs that are multiples of 32, and expert_size is 28"):
            config.quantised("uint4")

    def test_another_form(self):
        with pytest.raises(ConfigError, match="quantization"):
            LLM(LLAMA, quantization="int3")
