"""`LLM(quantization=...)`: what comes out equals a model whose matrices are what the numbers stand for."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdllm.checkpoints import loading
from jdllm.checkpoints.loading import load_params
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import is_spec, param_bytes, spec_tree, tree_bytes
from jdllm.quantised import Quantised, WeightForm
from tests.helpers import GOLDENS, slow
from tests.rounding import rounded_to_4_bits, rounded_to_8_bits, rounded_to_floats_of_8_bits

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
}


ROUNDED = {"int8": rounded_to_8_bits, "int4": rounded_to_4_bits, "fp8": rounded_to_floats_of_8_bits}


def with_rounded_matrices(source: Path, tmp_path: Path, form: WeightForm) -> Path:
    """The same checkpoint with rounded matrices in layers."""
    target = shutil.copytree(source, tmp_path / "rounded", copy_function=shutil.copyfile)
    file = target / "model.safetensors"
    tensors = load_file(file)
    in_layers = {
        name for name, x in tensors.items() if x.ndim == 2 and re.search(r"\.(layers|blocks)\.", name)
    }
    save_file({name: ROUNDED[form](x) if name in in_layers else x for name, x in tensors.items()}, file)
    return target


def tokens_of(model: Any, sampling: SamplingParams, **options: Any) -> list[list[int]]:
    with LLM(model, **SMALL, **options) as llm:
        return [list(out.token_ids) for out in llm.generate(prompt_token_ids=PROMPTS, sampling=sampling)]


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("name", ["llada", *map(slow, list(MODELS)[1:])])
def test_tokens_are_those_of_the_rounded_model(name: str, form: WeightForm, tmp_path: Path):
    source, sampling = GOLDENS / name, SamplingParams(**MODELS[name])
    kept = tokens_of(source, sampling, quantization=form)
    assert kept == tokens_of(with_rounded_matrices(source, tmp_path, form), sampling)


@pytest.mark.parametrize("form", ROUNDED)
def test_a_transformer_is_quantised_like_its_checkpoint(form: WeightForm):
    sampling = SamplingParams(max_tokens=12)
    module = Transformer.from_pretrained(LLAMA, dtype="float32")
    options = {name: value for name, value in SMALL.items() if name != "dtype"}
    with LLM(module, **options, quantization=form) as llm:
        found = [list(out.token_ids) for out in llm.generate(prompt_token_ids=PROMPTS, sampling=sampling)]
    assert found == tokens_of(LLAMA, sampling, quantization=form)


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("piece_bytes", [1 << 12, 1 << 20])
def test_matrices_are_rounded_as_they_are_loaded(
    piece_bytes: int, form: WeightForm, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loading, "PIECE_BYTES", piece_bytes)
    plain = config_from_hf(LLAMA)
    config = dataclasses.replace(plain, quantization=form)
    params, kept = load_params(LLAMA, plain, "float32"), load_params(LLAMA, config, "bfloat16")
    assert tree_bytes(kept) == param_bytes(config, "bfloat16") < param_bytes(plain, "bfloat16")

    def check(spec: Any, weight: jax.Array, found: Any) -> None:
        assert isinstance(found, Quantised) == (spec.quantised is not None and weight.ndim == 3)
        if isinstance(found, Quantised):
            exact = np.stack([ROUNDED[form](layer) for layer in np.asarray(weight)])
            np.testing.assert_allclose(found.dequantised(jnp.dtype("float32")), exact, rtol=1e-6, atol=1e-7)
        else:
            assert found.dtype == jnp.bfloat16

    jax.tree.map(check, spec_tree(config), params, kept, is_leaf=is_spec)


class TestRefusals:
    def test_experts(self):
        with pytest.raises(ConfigError, match="quantization is 'int8', which is for models without experts"):
            LLM(GOLDENS / "llada_moe", quantization="int8", progress=False)

    def test_several_cards(self):
        config = dataclasses.replace(config_from_hf(LLAMA), cards=2)
        with pytest.raises(ConfigError, match="which is for one device, and devices is 2"):
            config.quantised("int8")

    def test_an_odd_number_of_inputs(self):
        config = dataclasses.replace(config_from_hf(LLAMA), intermediate_size=161)
        assert config.quantised("int8").quantization == "int8"
        with pytest.raises(ConfigError, match="for even numbers of inputs, and intermediate_size is 161"):
            config.quantised("int4")

    def test_another_form(self):
        with pytest.raises(ConfigError, match="quantization"):
            LLM(LLAMA, quantization="int3")
