"""A memory budget on a card: it changes no token, or refuses beforehand. The case `plan` measures peaks."""

import jax
import numpy as np
import pytest

from jdllm import LLM, MemoryBudgetError, SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.planning.budget import GUARD, device_memory

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:a sequence of")]

MIB = 2**20
PROMPT = np.random.default_rng(0).integers(10, 60, 20_000).tolist()
SAMPLING = SamplingParams(gen_length=2_000, steps=2)


def device():
    found = jax.devices()[0]
    assert found.platform == "gpu", "this lane needs a card"
    return found


def generate(**options) -> list[int]:
    llm = LLM(checkpoint_path(), dtype="float32", **options)
    return llm.generate(prompt_token_ids=[PROMPT], sampling=SAMPLING)[0].token_ids


def budget(extra: int) -> int:
    """`extra` bytes for weights and activations."""
    measured = device_memory(device())
    assert measured is not None
    return measured.overhead + GUARD + extra


@pytest.fixture(scope="module")
def unplanned() -> list[int]:
    return generate()


def test_chunks_change_no_token(unplanned):
    assert generate(memory=budget(125 * MIB), host_memory="0") == unplanned


def test_host_memory_changes_no_token(unplanned):
    assert generate(memory=budget(80 * MIB), host_memory="8GiB") == unplanned


def test_what_does_not_fit_is_refused_before_anything_runs():
    with pytest.raises(MemoryBudgetError, match="longest context that fits is"):
        generate(memory=budget(80 * MIB), host_memory="0")


def test_the_overhead_of_a_context_is_plausible():
    measured = device_memory(device())
    assert measured is not None
    assert 100 * MIB < measured.overhead < 4096 * MIB
