"""The adapter with which a model drafts: what is read of it, what it computes, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdllm.checkpoints.adapters import adapter_bytes, load_adapter
from jdllm.checkpoints.loading import load_params
from jdllm.errors import CheckpointError
from jdllm.execution.transformer import forward
from jdllm.models.adapter import with_adapter
from jdllm.models.block import Rows
from jdllm.models.hf_config import config_from_hf
from tests.conftest import LLADA
from tests.helpers import Golden

NEMOTRON = Golden("nemotron_labs_diffusion")
FOLDER, CONFIG, WEIGHTS = "linear_spec_lora", "adapter_config.json", "adapter_model.safetensors"
NAME = "base_model.model.encoder.layers.{}.self_attn.o_proj.lora_{}.weight"
MODEL = config_from_hf(NEMOTRON.directory)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(NEMOTRON.directory / FOLDER, tmp_path / FOLDER, copy_function=shutil.copyfile)
    return tmp_path


def changed(directory: Path, **values: Any) -> None:
    file = directory / FOLDER / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_are_stacked_with_their_scale(dtype: str):
    adapter = load_adapter(NEMOTRON.directory, MODEL, dtype, load_weights=True)
    assert adapter is not None
    tensors = load_file(NEMOTRON.directory / FOLDER / WEIGHTS)
    for layer in range(MODEL.num_layers):
        for found, matrix, scale in ((adapter.down, "A", 1), (adapter.up, "B", 4)):
            expected = jnp.asarray(scale * tensors[NAME.format(layer, matrix)], dtype)
            np.testing.assert_array_equal(found[layer], expected)
    size = sum(x.size for x in tensors.values())
    counted = adapter_bytes(NEMOTRON.directory, MODEL, dtype)
    assert counted == adapter.bytes == size * jnp.dtype(dtype).itemsize


def test_sixteen_bit_files(copied: Path):
    """Here in bfloat16, which NumPy does not have."""
    tensors = load_file(copied / FOLDER / WEIGHTS)
    halved = {name: np.asarray(jnp.asarray(x, jnp.bfloat16)) for name, x in tensors.items()}
    save_file(halved, copied / FOLDER / WEIGHTS)
    adapter = load_adapter(copied, MODEL, "float32", load_weights=True)
    assert adapter is not None
    np.testing.assert_array_equal(adapter.down[1], halved[NAME.format(1, "A")].astype(np.float32))


def test_weights_that_are_not_read_are_zero():
    adapter, read = (
        load_adapter(NEMOTRON.directory, MODEL, "float32", load_weights=x) for x in (False, True)
    )
    assert adapter is not None
    assert read is not None
    assert (adapter.down.shape, adapter.up.shape) == (read.down.shape, read.up.shape)
    assert not adapter.down.any()
    assert not adapter.up.any()


def test_an_adapter_adds_a_product_to_the_output_projections():
    adapter = load_adapter(NEMOTRON.directory, MODEL, "float32", load_weights=True)
    assert adapter is not None
    params: Any = load_params(NEMOTRON.directory, MODEL, "float32")
    layers = params["layers"]
    merged = params | {"layers": layers | {"o": layers["o"] + adapter.up @ adapter.down}}
    tokens, end = np.arange(200, 220), np.full(20, 20)
    rows = Rows(np.arange(20), np.zeros(20, np.int32), end)
    plain, found, expected = (
        forward(each, MODEL, tokens, rows) for each in (params, with_adapter(params, MODEL, adapter), merged)
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - plain).max() > 0.1


def test_models_without_an_adapter(tmp_path: Path):
    assert load_adapter(tmp_path, MODEL, "float32", load_weights=True) is None
    assert adapter_bytes(tmp_path, MODEL, "float32") == 0
    assert (
        load_adapter(NEMOTRON.directory, config_from_hf(LLADA.directory), "float32", load_weights=True)
        is None
    )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"target_modules": ["o_proj", "q_proj"]},
            r"target_modules is \['o_proj', 'q_proj'\], expected \['o_proj'\]",
        ),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"use_rslora": True}, "use_rslora is True, expected None"),
        ({"r": 0}, "r is 0, expected a positive integer"),
        ({"lora_alpha": None}, "lora_alpha is None, expected a number"),
        ({"r": 8}, r"6 of another shape: .*lora_A.weight is \[4, 64\], expected \[8, 64\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_adapters_are_refused(copied: Path, values: dict[str, Any], told: str):
    changed(copied, **values)
    with pytest.raises(CheckpointError, match=told):
        load_adapter(copied, MODEL, "float32", load_weights=True)


def test_tensors_that_are_missing_or_unknown(copied: Path):
    file = copied / FOLDER / WEIGHTS
    tensors = load_file(file)
    save_file({name.replace("layers.2", "layers.3"): x for name, x in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=r"2 missing: .*layers\.2.*; 2 unknown: .*layers\.3"):
        load_adapter(copied, MODEL, "float32", load_weights=True)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has adapter_config\.json and no adapter_model\.safetensors"):
        load_adapter(copied, MODEL, "float32", load_weights=True)
