"""Qwen3 and SDAR-MoE from a checkpoint on disk to logits, against NumPy."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jdllm.checkpoints.loading import load_params
from jdllm.errors import CheckpointError
from jdllm.execution.module import Transformer
from jdllm.models.hf_config import config_from_hf
from tests.models import qwen3_reference as reference

Values = dict[str, Any]
CASES: dict[str, Values] = {
    "untied head": {},
    "tied head": {"tie_word_embeddings": True},
    "a window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "experts and blocks": reference.SDAR_MOE,
    "shares of experts as they are": reference.SDAR_MOE | {"norm_topk_prob": False, "mlp_only_layers": []},
}


def checkpoint(directory: Path, values: Values) -> reference.Tensors:
    """Write a random checkpoint; returns its tensors."""
    tensors = reference.random_tensors(values, seed=0)
    (directory / "config.json").write_text(json.dumps(values))
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_numpy(case: str, tmp_path: Path):
    values = reference.VALUES | CASES[case]
    tensors = checkpoint(tmp_path, values)
    config = config_from_hf(tmp_path)
    ids = np.random.default_rng(1).integers(0, values["vocab_size"], (2, 23))
    actual = Transformer(config, load_params(tmp_path, config, "float32"))(jnp.asarray(ids))
    expected = np.stack([reference.logits(tensors, values, row) for row in ids])
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_checkpoint_without_its_norms_is_refused(name: str, tmp_path: Path):
    tensors = checkpoint(tmp_path, reference.VALUES)
    missing = f"model.layers.1.self_attn.{name}.weight"
    save_file({k: v for k, v in tensors.items() if k != missing}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=missing):
        load_params(tmp_path, config_from_hf(tmp_path), "float32")
