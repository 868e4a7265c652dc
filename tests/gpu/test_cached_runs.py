"""Cached generation on a card: recorded runs in f32, and right answers in bf16, by our kernels."""

import jax
import pytest

from benchmarks.quality.cells import Cell, draw_instances, measure
from jdllm import LLM
from jdllm.demo import checkpoint_path
from tests.decoding import test_cached_trajectories as recorded

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


@pytest.mark.parametrize(("family", "name"), recorded.ALONE)  # each compiles steps of its own
def test_every_token_of_every_step(family: str, name: str, llm: LLM, dream_llm: LLM):
    recorded.test_every_token_of_every_step(family, name, llm, dream_llm)


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(checkpoint_path(), dtype="bfloat16", kv_pool="64MiB", progress=False)


@pytest.mark.parametrize("policy", ["none", "dual", "head_sparse"])
@pytest.mark.parametrize("alone", [True, False])
def test_answers_in_bf16(policy: str, alone: bool, demo: LLM):
    """Alone, rows are few enough to stream the weights."""
    scored = policy == "head_sparse"
    cell = Cell("schedule", policy, 0.9 if scored else None, 1 if scored else None)
    sampling, instances = cell.sampling(block_length=8), draw_instances(8 if alone else 48)
    groups = [[instance] for instance in instances] if alone else [instances]
    right = [answer for group in groups for answer in measure(demo, group, sampling).right]
    assert sum(right) >= 0.7 * len(right)
