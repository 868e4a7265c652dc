"""The bundled checkpoints: what they hold, and that they answer."""

import json
from pathlib import Path
from typing import get_args

import jax
import pytest

from benchmarks.quality.lost_in_the_middle import draw_questions, measure
from jdllm.checkpoints.loading import load_params, read_index
from jdllm.demo import Bundled, checkpoint_path
from jdllm.demo.data import Asked
from jdllm.demo.long_tasks import INSTRUCTION, LONG_TASKS
from jdllm.demo.tasks import TASKS, distinct_instances
from jdllm.demo.tokenizer import write_tokenizer
from jdllm.demo.train import SETTINGS, exact_match
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import is_spec, spec_tree

BUNDLED: tuple[Bundled, ...] = get_args(Bundled)


@pytest.mark.parametrize("model", BUNDLED)
def test_size_and_files(model: Bundled):
    sizes = {path.name: path.stat().st_size for path in checkpoint_path(model).iterdir()}
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 8e6


@pytest.mark.parametrize("model", BUNDLED)
def test_it_is_what_the_script_writes(model: Bundled, tmp_path: Path):
    write_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert (checkpoint_path(model) / path.name).read_text() == path.read_text()
    expected = SETTINGS[model].hf_config()
    assert json.loads((checkpoint_path(model) / "config.json").read_text()) == expected


@pytest.mark.parametrize("model", BUNDLED)
def test_tensors_are_those_of_the_spec_tree(model: Bundled):
    path = checkpoint_path(model)
    specs = jax.tree.leaves(spec_tree(config_from_hf(path)), is_leaf=is_spec)
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in read_index(path).items()}
    assert stored == {name: ("BF16", spec.source_shape) for spec in specs for name, _ in spec.sources()}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", ["demo", "block"])
def test_it_answers_what_it_never_saw(model: Bundled, task: str):
    config = config_from_hf(checkpoint_path(model))
    params = load_params(checkpoint_path(model), config, "float32")
    asked = [Asked.plainly(instance) for instance in distinct_instances(task, "test", 24, seed=8)]
    assert exact_match(params, config, asked) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("task", LONG_TASKS)
def test_it_finds_facts_in_chunks_of_long_contexts(task: str):
    """At three places of each of four contexts of sixteen chunks, of which four are read."""
    questions = draw_questions(task, 4096, instances=4, positions=3, chunk_lengths=[256], key_letters=4)
    with LLM(checkpoint_path("retrieval"), dtype="float32", progress=False) as llm:
        found = measure(llm, questions, 3, "256x4", INSTRUCTION, "causal")
    assert found.seen.mean() > 0.9
    assert found.right.mean() > 0.5
