"""The bundled checkpoint: what it holds, and that it answers."""

import json

import jax
import pytest

from jdllm.checkpoints.loading import load_params, read_index
from jdllm.demo import checkpoint_path
from jdllm.demo.data import Asked
from jdllm.demo.export import hf_config
from jdllm.demo.tasks import TASKS, distinct_instances
from jdllm.demo.tokenizer import write_tokenizer
from jdllm.demo.train import TrainSettings, exact_match
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import is_spec, spec_tree


def test_size_and_files():
    sizes = {path.name: path.stat().st_size for path in checkpoint_path().iterdir()}
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 8e6


def test_it_is_what_the_script_writes(tmp_path):
    write_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert (checkpoint_path() / path.name).read_text() == path.read_text()
    default = TrainSettings()
    expected = hf_config(
        default.hidden_size, default.num_layers, default.num_heads, default.intermediate_size
    )
    assert json.loads((checkpoint_path() / "config.json").read_text()) == expected


def test_tensors_are_those_of_the_spec_tree():
    specs = jax.tree.leaves(spec_tree(config_from_hf(checkpoint_path())), is_leaf=is_spec)
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in read_index(checkpoint_path()).items()}
    assert stored == {name: ("BF16", spec.source_shape) for spec in specs for name, _ in spec.sources()}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_it_answers_what_it_never_saw(task: str):
    config = config_from_hf(checkpoint_path())
    params = load_params(checkpoint_path(), config, "float32")
    asked = [Asked.plainly(instance) for instance in distinct_instances(task, "test", 24, seed=8)]
    assert exact_match(params, config, asked) > 0.8
