"""Steps within a memory budget: tokens do not depend on it, and what cannot fit is refused beforehand."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from jdllm import LLM
from jdllm.chunks import ChunkConfig
from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import ConfigError
from jdllm.execution.offload.tiers import HostTiers
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, param_bytes
from jdllm.planning.budget import Budget, MemoryBudgetError
from jdllm.planning.templates import step_template
from jdllm.serving.denoise.full_runner import FullRunner
from jdllm.serving.engine import Engine
from tests.conftest import LLADA
from tests.engines import engine_of, finish, generation_request

PROMPT = np.arange(300) % 90
MIB = 2**20


class Run(NamedTuple):
    """Tokens of a request that ran within a budget, and the choices that were made for it."""

    tokens: list[int]
    choices: list


def run(
    params: Params, config: ModelConfig, executables: Executables, budget: Budget | None, prompt=PROMPT
) -> Run:
    request = generation_request(0, prompt, SamplingParams(gen_length=64, steps=4), config)
    engine = engine_of(params, config, executables, 4096, budget=budget)
    _, (ended,) = finish(engine, [request])
    return Run(ended.tokens.tolist(), choices_of(engine))


def choices_of(engine: Engine) -> list:
    [full] = [one for one in engine.parts.compiled if isinstance(one, FullRunner)]
    return list(full.choices.values())


@pytest.fixture(scope="module")
def unplanned(params: Params, config: ModelConfig, executables: Executables) -> Run:
    return run(params, config, executables, None)


@pytest.fixture
def small(params: Params, config: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    """Budgets in bytes above the weights, where products need no workspace."""
    monkeypatch.setattr("jdllm.planning.templates.WORKSPACE", 0)
    step_template.cache_clear()
    yield lambda extra, host=0: Budget(param_bytes(config, "float32") + extra, 0, host)
    step_template.cache_clear()


@pytest.mark.slow
def test_a_large_budget_cuts_nothing(params, config, executables, unplanned, small):
    planned = run(params, config, executables, small(2**40))
    assert planned.tokens == unplanned.tokens
    assert all(tiers is None and set(dataclasses.astuple(chunks)) == {1} for chunks, tiers in planned.choices)


@pytest.mark.slow
def test_a_small_budget_cuts_and_changes_no_token(
    params, config, executables, unplanned, small, monkeypatch: pytest.MonkeyPatch
):
    # What the CPU's compiler says of its temporaries is not what is planned for.
    monkeypatch.setattr("jdllm.serving.denoise.full_runner.temp_bytes", lambda executable: 0)
    cut = set()
    for extra in (2800, 1600):
        planned = run(params, config, executables, small(extra * 2**10))
        assert planned.tokens == unplanned.tokens
        cut |= {
            name for chunks, _ in planned.choices for name, n in dataclasses.asdict(chunks).items() if n > 1
        }
    assert {"query", "heads"} <= cut


def test_what_does_not_fit_is_refused_with_the_longest_context(params, config, executables, small):
    budget = small(300 * 2**10)
    with pytest.raises(MemoryBudgetError, match=r"longest context that fits|no context fits") as error:
        run(params, config, executables, budget)
    assert error.value.needed_bytes > error.value.available_bytes == budget.device


@pytest.mark.slow
def test_fixed_counts_that_do_not_fit_name_their_own_need(params, config, executables, small):
    budget = small(900 * 2**10)
    request = generation_request(0, PROMPT, SamplingParams(gen_length=64, steps=4), config)

    def steps(budget: Budget) -> int:
        engine = engine_of(params, config, executables, 4096, budget=budget, chunks=ChunkConfig(ffn=2))
        return len(finish(engine, [request])[0])

    with pytest.raises(MemoryBudgetError) as error:
        steps(budget)
    needed = error.value.needed_bytes
    assert needed > budget.device
    # A larger budget has larger entries: the step of its own that was refused may become one of them.
    assert steps(dataclasses.replace(budget, device=2 * needed))
    with pytest.raises(MemoryBudgetError):
        steps(dataclasses.replace(budget, device=needed - 2**16))


@pytest.mark.slow
def test_a_misfit_of_the_compiler_raises_the_counts(
    params, config, executables, unplanned, small, monkeypatch: pytest.MonkeyPatch
):
    claims = iter([2000 * 2**10])
    monkeypatch.setattr("jdllm.serving.denoise.full_runner.temp_bytes", lambda executable: next(claims, 0))
    planned = run(params, config, executables, small(1900 * 2**10))
    assert planned.tokens == unplanned.tokens
    assert any(max(dataclasses.astuple(chunks)) > 1 for chunks, _ in planned.choices)


@pytest.mark.slow
def test_a_compiler_that_never_agrees_is_refused(params, config, executables, small, monkeypatch):
    monkeypatch.setattr("jdllm.serving.denoise.full_runner.temp_bytes", lambda executable: 2**40)
    with pytest.raises(MemoryBudgetError):
        run(params, config, executables, small(8 * MIB))


@pytest.mark.slow
def test_host_memory_is_used_where_the_device_is_too_small(params, config, executables, small, monkeypatch):
    rung = HostTiers(chunk_rows=128, kv=True)
    for module in ("jdllm.planning.plan", "jdllm.planning.account", "jdllm.serving.denoise.full_runner"):
        monkeypatch.setattr(f"{module}.rungs", lambda config: [rung])
    prompt = np.resize(PROMPT, 1200)
    expected = run(params, config, executables, None, prompt).tokens
    for extra in range(300, 3000, 30):
        try:
            planned = run(params, config, executables, small(extra * 2**10, host=2**30), prompt)
        except MemoryBudgetError:
            continue
        assert planned.tokens == expected
        assert planned.choices[0][1] == rung, "the smallest budget that fits at all uses host memory"
        return
    pytest.fail("no budget fits")


@pytest.mark.parametrize("memory", ["24 parsecs", -3, "0GiB", ""])
def test_a_budget_that_is_no_size_is_refused(memory):
    with pytest.raises(ConfigError, match="memory is"):
        LLM(LLADA.directory, memory=memory)


@pytest.mark.filterwarnings("ignore:a sequence of")
def test_llm_plans_within_its_memory():
    with pytest.raises(MemoryBudgetError, match=r"longest context that fits is [0-9]+ tokens"):
        LLM(LLADA.directory, dtype="float32", memory="36MiB", host_memory="0").generate(
            prompt_token_ids=[[1] * 20_000], sampling=SamplingParams(gen_length=20_000, steps=1)
        )
