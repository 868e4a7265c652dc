"""What the metadata of a GGUF file say of the model."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jdllm.checkpoints.loading import load_params
from jdllm.errors import ConfigError
from jdllm.models.hf_config import config_from_hf, read_config
from jdllm.models.rotary import inverse_frequencies
from tests.checkpoints.gguf_writer import write_gguf
from tests.helpers import GOLDENS


def rope_factors(theta: float, dim: int, factor: float, original: int) -> np.ndarray:
    """As the converter computes them, in float64."""
    found = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (i / dim)
        if wavelength < original / 4:
            found.append(1.0)
        elif wavelength > original:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 32), (1.0, 8192)])
def test_factors_of_frequencies_are_the_scaling_of_llama_3(factor: float, original: int, tmp_path: Path):
    factors = rope_factors(5e5, 16, factor, original)
    write_gguf(GOLDENS / "llama", tmp_path / "model.gguf", raw={"rope_freqs.weight": (factors, Kind.F32)})
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    values = json.loads((GOLDENS / "llama" / "config.json").read_text())
    if factor > 1:
        values |= {"rope_scaling": scaling | {"original_max_position_embeddings": original}}
    file = tmp_path / "model.gguf"
    found, expected = (inverse_frequencies(config_from_hf(x).rope, 16) for x in (file, values))
    np.testing.assert_array_equal(found, expected)
    load_params(file, config_from_hf(file), "float32")


@pytest.mark.parametrize(
    ("family", "metadata", "scaling"),
    [
        ("llama", {"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"type": "none", "factor": 4.0}, None),
        (
            "qwen2",
            {"type": "yarn", "factor": 4.0, "original_context_length": 32768, "yarn_beta_fast": 16.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_scalings_of_positions(
    family: str, metadata: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path
):
    source, file = GOLDENS / family, tmp_path / "model.gguf"
    write_gguf(source, file, values={f"{family}.rope.scaling.{key}": x for key, x in metadata.items()})
    expected = config_from_hf(read_config(source) | {"rope_scaling": scaling})
    assert config_from_hf(file).rope == expected.rope


@pytest.mark.parametrize(
    ("family", "values"),
    [
        (
            "llama",
            {"logit_scale": 1.0, "tensor_data_layout": "Meta AI original pth", "expert_count": 0}
            | {"rope.scaling.finetuned": True, "rope.scaling.attn_factor": 1.0, "attention.causal": True},
        ),
        ("llada-moe", {"expert_gating_func": 1, "expert_weights_scale": 1.0, "expert_weights_norm": False}),
    ],
)
def test_metadata_that_say_what_holds_anyway_change_nothing(
    family: str, values: dict[str, Any], tmp_path: Path
):
    for name, metadata in (("plain", {}), ("stated", {f"{family}.{key}": x for key, x in values.items()})):
        write_gguf(GOLDENS / family.replace("-", "_"), tmp_path / f"{name}.gguf", values=metadata)
    assert config_from_hf(tmp_path / "plain.gguf") == config_from_hf(tmp_path / "stated.gguf")


def test_no_id_that_the_metadata_lack_is_taken_from_elsewhere(tmp_path: Path):
    """The class of Llama has an end of sequence by default."""
    source = Path(shutil.copytree(GOLDENS / "llama", tmp_path / "source"))
    config = read_config(source)
    del config["eos_token_id"]
    (source / "config.json").write_text(json.dumps(config))
    write_gguf(source, tmp_path / "model.gguf")
    assert (config_from_hf(source).eos_ids, config_from_hf(tmp_path / "model.gguf").eos_ids) == ((2,), ())


@pytest.mark.parametrize(
    ("family", "values", "told"),
    [
        ("llama", {"general.type": "adapter"}, "holds something else than a model: .*'adapter'"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope'"),
        ("llama", {"llama.attention.sliding_window": 64}, "llama.attention.sliding_window 64"),
        ("llama", {"llama.expert_count": 8}, "llama.expert_count 8"),
        ("llama", {"llama.attention.causal": False}, "llama.attention.causal False"),
        ("qwen2", {"qwen2.pooling_type": 3}, "qwen2.pooling_type 3"),
        ("qwen2", {"qwen2.rope.scaling.yarn_ext_factor": 0.0}, "yarn_ext_factor 0.0"),
        ("dream", {"diffusion.shift_logits": False}, "diffusion.shift_logits False"),
        ("llada_moe", {"llada-moe.expert_gating_func": 2}, "llada-moe.expert_gating_func 2"),
        ("llada_moe", {"llada-moe.expert_weights_norm": True}, "llada-moe.expert_weights_norm True"),
    ],
)
def test_metadata_that_are_not_followed_are_refused_by_name(
    family: str, values: dict[str, Any], told: str, tmp_path: Path
):
    write_gguf(GOLDENS / family, tmp_path / "model.gguf", values=values)
    with pytest.raises(ConfigError, match=rf"model.gguf .*{told}"):
        config_from_hf(tmp_path / "model.gguf")
