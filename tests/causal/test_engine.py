"""Causal requests in the engine: parts of prompts, company, ends, failures, and noise."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import NonFiniteError, RequestError
from jdllm.execution.paged import stored_keys
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.causal.request import causal_spec
from jdllm.serving.demands import Kind
from jdllm.serving.updates import Ended, PartDone, StepUpdate
from tests.causal.running import FREE, Build, Oracle, answers, greedy, prompt, run
from tests.decoding.numpy_noise import gumbel, token_bits
from tests.engines import engine_of


@pytest.mark.slow
def test_prompts_in_parts_beside_decodes(build: Build, config: ModelConfig, oracle: Oracle):
    """Parts end inside prompts, at pages, and prompts end inside pages and at their edge."""
    asked = [(prompt(n), FREE) for n in (300, 1, 64, 65, 128, 129, 200)]
    engine = build(rows=192)
    parts: list[PartDone] = []
    engine.observe = parts.append
    found = answers(run(engine, asked, config))
    assert found == [greedy(oracle, ids, 9) for ids, _ in asked]
    assert {part.kind for part in parts} == {Kind.PREFILL, Kind.DECODE}
    assert max(part.rows for part in parts if part.kind is Kind.PREFILL) <= 192


@pytest.mark.slow
def test_keys_are_gathered_some_at_a_time(
    params: Params, config: ModelConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stored_keys, "GATHERED_KEYS", 128)
    engine = engine_of(params, config, Executables("cpu"), 192, pages=40)
    asked = [(prompt(n), FREE) for n in (700, 300)]
    assert answers(run(engine, asked, config)) == [greedy(oracle, ids, 9) for ids, _ in asked]


@pytest.mark.slow
def test_pages_are_filled_and_left(build: Build, config: ModelConfig, oracle: Oracle):
    """Generation crosses pages; a pool that held others before gives the same tokens."""
    long = dataclasses.replace(FREE, max_tokens=140, gen_length=140)
    engine = build(pages=8)
    for seed in range(2):
        ids = prompt(60, seed)
        [request] = run(engine, [(ids, long)], config)
        assert answers([request]) == [greedy(oracle, ids, 140)]
        assert engine.stats().free_pages == 7


@pytest.mark.slow
def test_company_changes_nothing(build: Build, config: ModelConfig):
    drawn = {"temperature": 0.9, "max_tokens": 12, "early_stop": False}
    asked = [
        (prompt(5), SamplingParams(seed=3, **drawn)),
        (prompt(90), SamplingParams(seed=4, top_p=0.7, **drawn)),
        (prompt(70), SamplingParams(seed=5, top_k=7, min_p=0.01, **drawn)),
        (prompt(8), FREE),
    ]
    together = run(build(), asked, config)
    alone = [run(build(), [one], config)[0] for one in asked]
    assert answers(together) == answers(alone)
    assert len(set(map(tuple, answers(together)))) == 4
    for mine, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.slow
def test_noise_is_keyed_by_seed_step_and_position(build: Build, config: ModelConfig, oracle: Oracle):
    ids, tokens = prompt(20), list(prompt(20))
    sampling = SamplingParams(temperature=0.8, seed=77, max_tokens=6, early_stop=False)
    [request] = run(build(), [(ids, sampling)], config)
    for step in range(6):
        clean = oracle(np.array(tokens)).astype(np.float64)
        noised = clean + 0.8 * gumbel(token_bits(77, step, len(tokens), config.vocab_size))
        tokens.append(int(noised.argmax()))
        exact = clean - clean.max()
        expected = exact[tokens[-1]] - np.log(np.exp(exact).sum())
        np.testing.assert_allclose(request.logprobs[len(tokens) - 1], expected, atol=2e-4)
    assert answers([request]) == [tokens[20:]]


@pytest.mark.slow
def test_the_likeliest_are_those_of_the_clean_distribution(build: Build, config: ModelConfig, oracle: Oracle):
    """Of a prompt's first token and of those behind it, beside requests that ask for nothing or filter."""
    drawn = {"temperature": 0.8, "max_tokens": 6, "early_stop": False}
    asked = [
        (prompt(20), SamplingParams(logprobs=3, seed=77, top_p=0.7, **drawn)),
        (prompt(9), FREE),
        (prompt(70), SamplingParams(logprobs=20, max_tokens=6, return_history=True, early_stop=False)),
    ]
    specs = [causal_spec(ids, sampling, config) for ids, sampling in asked]
    engine, ended, told = build(), {}, []
    for update in engine.run(specs, updates="every"):
        if isinstance(update, Ended):
            ended[update.request] = update.state
        else:
            told.append(update)
    for number, (ids, sampling) in enumerate(asked):
        request, count = ended[number], sampling.listed
        assert request.likeliest.shape == (len(request.tokens), count)
        mine = [update for update in told if update.request == number]
        for place in range(len(ids), len(ids) + 6) if count else ():
            exact = oracle(request.tokens[:place]).astype(np.float64)
            exact -= np.logaddexp.reduce(exact)
            order = np.lexsort((np.arange(len(exact)), -exact))[:count]
            assert request.likeliest["id"][place].tolist() == order.tolist()
            np.testing.assert_allclose(request.likeliest["logprob"][place], exact[order], atol=2e-4)
            np.testing.assert_array_equal(mine[place - len(ids)].likeliest[0], request.likeliest[place])


def test_stop_ids_end_a_text(build: Build, config: ModelConfig, oracle: Oracle):
    ids = prompt(11)
    full = greedy(oracle, ids, 20)
    stop = full[6]
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(stop,))
    other = (prompt(30), SamplingParams(max_tokens=20, early_stop=False))
    [request, _] = run(build(), [(ids, sampling), other], config)
    end = full.index(stop)
    assert request.end_of_text() == end
    assert answers([request])[0][: end + 1] == full[: end + 1]
    assert request.steps == end + 1


def test_stop_strings_end_a_text(build: Build, config: ModelConfig, oracle: Oracle):
    ids = prompt(11)
    full = greedy(oracle, ids, 20)
    decode = lambda ids, before=(), *, final=True: "".join(f"<{i}>" for i in ids)  # noqa: E731
    spec = causal_spec(ids, SamplingParams(max_tokens=20, stop=(f"{full[3]}><{full[4]}",)), config, decode)
    [ended] = [u for u in build().run([spec], updates="none") if isinstance(u, Ended)]
    assert ended.error is None
    assert ended.state.end_of_text() == 4
    assert ended.state.steps == 5


def test_every_token_is_told_as_it_comes(build: Build, config: ModelConfig):
    """Four of them may come together."""
    spec, engine = causal_spec(prompt(10), FREE, config), build()
    parts: list[PartDone] = []
    engine.observe = parts.append
    told = [(u, len(parts)) for u in engine.run([spec], updates="every")]
    assert [after for u, after in told if isinstance(u, StepUpdate)] == [1, *[2] * 4, *[3] * 4]
    steps = [u for u, _ in told if isinstance(u, StepUpdate)]
    assert [u.step for u in steps] == list(range(9))
    assert [u.positions.tolist() for u in steps] == [[10 + i] for i in range(9)]
    assert all(u.committed.all() for u in steps)


def test_a_lost_pool_is_computed_again(build: Build, config: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    """Another's prefill takes the pool: whoever was generating goes on with the same tokens."""
    expected = answers(run(build(), [(prompt(70), FREE)], config))
    engine = build()
    launch = engine.parts.launchers[Kind.PREFILL]
    failing = [False]

    def launched(requests: Any, steps: int) -> Any:
        out = launch(requests, steps)

        def fail() -> Any:
            pool = engine.pool.arrays
            assert pool is not None
            jax.tree.leaves(pool)[0].delete()
            raise RuntimeError("the device failed")

        return out._replace(run=fail) if failing[0] else out

    monkeypatch.setitem(engine.parts.launchers, Kind.PREFILL, launched)
    updates: list[Any] = []
    first = engine.add(causal_spec(prompt(70), FREE, config), updates="every")
    for _ in range(2):
        updates += engine.step()
    failing[0] = True
    second = engine.add(causal_spec(prompt(9), FREE, config))
    while not any(isinstance(u, Ended) for u in updates):
        updates += engine.step()
    failing[0] = False
    while not engine.idle:
        updates += engine.step()
    ended = {u.request: u for u in updates if isinstance(u, Ended)}
    assert str(ended[second].error) == "the device failed"
    assert ended[first].error is None
    assert answers([ended[first].state]) == expected
    assert engine.stats().rebuilt == 1
    assert engine.stats().free_pages == engine.stats().pages


def test_values_that_are_no_numbers(params: Params, config: ModelConfig):
    broken = {**params, "final_norm": params["final_norm"].at[3].set(jnp.nan)}
    engine = engine_of(broken, config, Executables("cpu"), 256, pages=40)
    with pytest.raises(NonFiniteError):
        run(engine, [(prompt(9), FREE)], config)
    assert engine.idle


@pytest.mark.slow
def test_warm_up_compiles_all(params: Params, config: ModelConfig):
    engine = engine_of(params, config, executables := Executables("cpu"), 128, pages=20)
    engine.warm()
    compiled = executables.compiled
    assert compiled <= 48
    drawn = SamplingParams(temperature=1.0, top_k=5, max_tokens=20, early_stop=False)
    run(engine, [(prompt(n), s) for n, s in ((3, FREE), (300, drawn), (64, FREE), (130, drawn))], config)
    run(engine, [(prompt(n, 1), FREE) for n in range(1, 61)], config)
    assert executables.compiled == compiled


def test_what_a_causal_model_refuses(build: Build, config: ModelConfig):
    with pytest.raises(RequestError, match="pages of the KV pool"):
        run(build(pages=4), [(prompt(300), FREE)], config)
