"""Prompts that begin alike share pages, and what failed leaves none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.errors import NonFiniteError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.causal.request import CausalRequest
from jdllm.serving.demands import Kind
from jdllm.serving.updates import PartDone
from tests.causal.running import FREE, Build, Oracle, answers, greedy, prompt, run
from tests.engines import engine_of


def test_a_second_turn_evaluates_its_new_tokens(build: Build, config: ModelConfig, oracle: Oracle):
    engine = build()
    long = dataclasses.replace(FREE, max_tokens=40, gen_length=40)
    first = prompt(100)
    [before] = run(engine, [(first, long)], config)
    turn = np.concatenate([before.tokens, prompt(30, 1)])
    parts: list[PartDone] = []
    engine.observe = parts.append
    [after] = run(engine, [(turn, FREE)], config)
    assert answers([after]) == [greedy(oracle, turn, 9)]
    # 139 rows were stored, the last token's was not: two pages.
    assert isinstance(after, CausalRequest)
    assert after.found == 128
    assert sum(part.rows for part in parts if part.kind is Kind.PREFILL) == len(turn) - 128
    assert engine.stats().free_pages == engine.stats().pages


@pytest.mark.slow
def test_company_reads_the_same_pages(build: Build, config: ModelConfig):
    engine = build()
    system = prompt(130)
    run(engine, [(system, FREE)], config)
    asked = [(np.concatenate([system, prompt(n, 2)]), FREE) for n in (3, 50, 1)]
    shared = run(engine, asked, config)
    assert [request.found for request in shared if isinstance(request, CausalRequest)] == [128] * 3
    assert answers(shared) == answers(run(build(), asked, config))


def test_the_same_prompt_again_evaluates_its_last_page(build: Build, config: ModelConfig):
    engine = build()
    runs = [run(engine, [(prompt(128), FREE)], config)[0] for _ in range(2)]
    assert isinstance(runs[1], CausalRequest)
    assert runs[1].found == 64
    assert answers(runs[:1]) == answers(runs[1:])


@pytest.mark.slow
def test_stored_pages_make_room(build: Build, config: ModelConfig):
    engine = build(pages=7)
    for seed in range(4):
        [request] = run(engine, [(prompt(300, seed), FREE)], config)
        assert isinstance(request, CausalRequest)
        assert request.found == 0


@pytest.mark.slow
def test_what_is_no_number_leaves_the_pool(params: Params, config: ModelConfig, oracle: Oracle):
    """Whoever gets the pages next may read rows before it has written them."""
    embed = params["embed"].at[450].set(jnp.nan)
    engine = engine_of({**params, "embed": embed}, config, Executables("cpu"), 256, pages=8)
    broken = np.append(prompt(200), 450).astype(np.int32)
    with pytest.raises(NonFiniteError):
        run(engine, [(broken, FREE)], config)
    pool = engine.pool.arrays
    assert pool is not None
    assert not any(bool(jnp.isnan(x).any()) for x in jax.tree.leaves(pool))
    [request] = run(engine, [(prompt(60), FREE)], config)
    assert answers([request]) == [greedy(oracle, prompt(60), 9)]
