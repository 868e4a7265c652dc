"""Models whose weights leave the device no room to work: some layers in host memory, and the same tokens."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from jdllm import LLM, SamplingParams
from jdllm.errors import ConfigError, RequestError
from jdllm.execution.offload.placement import host_weight_bytes
from jdllm.models.hf_config import config_from_hf
from jdllm.pallas.device import CPU
from jdllm.planning.budget import MemoryBudgetError
from jdllm.planning.card import described_card
from jdllm.planning.plan import Workload
from jdllm.planning.question import StepQuestion
from jdllm.planning.sharing import less
from jdllm.planning.templates import step_template
from tests.conftest import LLADA
from tests.decoding.adaptive_models import CAUSAL, tiny

PROMPTS = [[1, 2, 3] * 20, [7] * 33]
SAMPLING = SamplingParams(gen_length=32, steps=8, block_length=16)
ROWS = 256
MIB = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of a MiB each."""
    config = dataclasses.replace(
        config_from_hf(LLADA.directory), num_layers=6, hidden_size=128, intermediate_size=512, head_dim=32
    )
    directory = tmp_path_factory.mktemp("offloaded") / "model"
    return write_random_checkpoint(directory, llada_hf_config(config, "float32"))


@pytest.fixture(autouse=True)
def no_workspace(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jdllm.planning.templates.WORKSPACE", 0)
    step_template.cache_clear()
    yield
    step_template.cache_clear()


def small(checkpoint: Path, memory: float, **options) -> LLM:
    size = int(memory * MIB)
    return LLM(checkpoint, memory=size, max_num_batched_tokens=ROWS, progress=False, **options)


def tokens(llm: LLM, **options: Any) -> list[list[int]]:
    sampling = dataclasses.replace(SAMPLING, **options)
    return [out.token_ids for out in llm.generate(prompt_token_ids=PROMPTS, sampling=sampling)]


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Iterator[LLM]:
    """The model with all of its layers on the device."""
    with LLM(checkpoint, max_num_batched_tokens=ROWS, progress=False) as llm:
        yield llm


@pytest.mark.slow
def test_as_many_layers_as_fit_stay_and_tokens_are_the_same(checkpoint: Path, whole: LLM):
    with small(checkpoint, 8, kv_pool="1MiB") as llm:
        account = llm.account
        assert 0 < account.offloaded < 6
        assert account.pages == 2
        assert account.budget is not None
        assert account.weights + account.largest_step + account.pool_bytes <= account.budget.device
        assert tokens(llm) == tokens(whole)
        assert "B parameters" in repr(llm)
        with pytest.raises(RequestError, match="pages of the KV pool"):
            tokens(llm, cache="prefix")


@pytest.mark.slow
def test_a_context_that_is_asked_for_moves_layers(checkpoint: Path):
    with small(checkpoint, 12) as llm:
        assert llm.account.offloaded == 0
        assert llm.account.max_refresh < 512
    with small(checkpoint, 12, max_context=512) as llm:
        assert llm.account.offloaded
        assert llm.account.max_context >= 512


@pytest.mark.slow
def test_layers_move_beside_a_verifier_as_planned(checkpoint: Path):
    config = config_from_hf(checkpoint)
    verifier = tiny(dataclasses.replace(CAUSAL, vocab_size=config.vocab_size))
    sampling = SamplingParams(gen_length=16, transfer="adaptive", max_lookahead=4, mixture_weight=0.3)
    with LLM(checkpoint, verifier=verifier, max_num_batched_tokens=ROWS, progress=False) as llm:
        expected = [out.token_ids for out in llm.generate(prompt_token_ids=PROMPTS, sampling=sampling)]
    with small(checkpoint, 8, verifier=verifier) as llm:
        account = llm.account
        found = [out.token_ids for out in llm.generate(prompt_token_ids=PROMPTS, sampling=sampling)]
    assert found == expected
    assert len({token for tokens in found for token in tokens}) > 2
    assert account.budget is not None
    budget = less(account.budget, account.verifier)
    workload = Workload(config, "float32", CPU)
    sizes = {"max_num_batched_tokens": ROWS}
    question = StepQuestion(workload, described_card("h200"), budget, None, sizes, account.verifier)
    engine = question.engine()
    assert engine is not None
    assert account.verifier
    assert engine.offloaded == account.offloaded > 0
    assert (engine.weights, engine.pages, engine.rows) == (account.weights, account.pages, account.rows)


def test_what_fits_nowhere_is_refused_in_one_line(checkpoint: Path):
    config = config_from_hf(checkpoint)
    needed = host_weight_bytes(config, "float32", 6)
    with pytest.raises(
        ConfigError, match=r"of host memory, and host_memory is .*: raise memory or host_memory"
    ):
        small(checkpoint, 6, host_memory=needed - 1)
    with pytest.raises(MemoryBudgetError, match=r"no context fits"):
        small(checkpoint, 6, host_memory="0")
    with pytest.raises(ConfigError, match="lower kv_pool"):
        small(checkpoint, 6, kv_pool="5MiB")
    with pytest.raises(ConfigError, match=r"load_weights is False, .* 6 layers would be in host memory"):
        small(checkpoint, 6, load_weights=False)
    with pytest.raises(MemoryBudgetError, match="needs at least"):
        small(checkpoint, 2)
