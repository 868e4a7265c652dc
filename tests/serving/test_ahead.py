"""Steps that are packed before the host has seen the tokens of the steps before: tokens are the same."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended
from tests.engines import engine_of, finish, generation_request

ROWS = {"llada": 128, "dream": 160}  # four tiles
TABLES: list[dict[str, Any]] = [
    {"cache": "dual"},
    {"cache": "dual", "steps": 6},
    {"cache": "prefix", "temperature": 1.0},
    {"cache": "head_sparse", "retention": 0.5, "refresh_delay": 0},
    {"cache": "head_sparse", "retention": 0.5, "refresh_delay": 1},
    {"cache": "selective", "refresh_interval": 3},
    {"cache": "prompt", "remasking": "random"},
]
"""Choices in which a table says how many tokens each step commits."""

DREAM_TABLES: list[dict[str, Any]] = [
    {"cache": "dual", "alg": "maskgit_plus", "steps": 12},
    {"cache": "dual", "alg": "origin", "steps": 12, "temperature": 0.5},
    {"cache": "prefix", "official_forcing": True, "steps": 12},
    {"cache": "head_sparse", "alg": "maskgit_plus", "alg_temp": 0.7, "steps": 8},
    {"cache": "dual", "alg": "entropy", "steps": 12},
]
OTHERS: list[dict[str, Any]] = [
    {"cache": "dual", "transfer": "threshold", "threshold": 0.3},
    {"cache": "dual", "temperature": 0.7, "top_p": 0.8},
    {"cache": "none"},
]


class Family(NamedTuple):
    """An engine that clients share, and one to run requests alone."""

    shared: Engine
    alone: Engine
    config: ModelConfig
    tables: list[dict[str, Any]]


@pytest.fixture(scope="module", params=[pytest.param("llada", marks=pytest.mark.slow), "dream"])
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    """LLaDA's has single steps of their own, which a warm-up compiles."""
    prefix = "" if request.param == "llada" else "dream_"
    params: Params = request.getfixturevalue(f"{prefix}params")
    config: ModelConfig = request.getfixturevalue(f"{prefix}config")
    shared = engine_of(params, config, Executables("cpu"), ROWS[request.param])
    if request.param == "llada":
        shared.warm()
    shared.scheduler.share()
    alone = engine_of(params, config, Executables("cpu"), ROWS[request.param])
    yield Family(shared, alone, config, TABLES if request.param == "llada" else TABLES + DREAM_TABLES)
    shared.close()
    alone.close()
    gc.collect()


@pytest.fixture(autouse=True)
def _steps_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes longer than the host does between two parts."""
    monkeypatch.setattr("jdllm.serving.scheduler.HOST_SECONDS", 0.0)


def drawn(
    rng: np.random.Generator, choices: Sequence[dict[str, Any]], config: ModelConfig, index: int
) -> Request:
    options = choices[int(rng.integers(len(choices)))]
    given = {"gen_length": 12, "block_length": 6, "early_stop": bool(rng.integers(2)), "seed": index}
    if "alg" in options and "cache" not in options:
        del given["block_length"]
    prompt = rng.integers(1, 200, int(rng.integers(2, 20)))
    return generation_request(index, prompt, SamplingParams(**given | options), config)


def packed_ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Notes for every part of reuses whether some of its requests wait for tokens."""
    found, submit = list[bool](), engine.runner.submit

    def note(kind: Kind, requests: list[Request], max_steps: int) -> Any:
        if kind is Kind.REUSE:
            found.append(any(request.awaited is not None for request in requests))
        return submit(kind, requests, max_steps)

    monkeypatch.setattr(engine.runner, "submit", note)
    return found


def told_of(engine: Engine, requests: Sequence[Request]) -> Any:
    """What became of each of the requests, one after another."""
    return [result(finish(engine, [request])[1][0]) for request in requests]


def result(state: Request) -> tuple[list[int], list[int], int]:
    return state.tokens.tolist(), state.committed_in.tolist(), state.steps


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_requests_in_company_are_what_they_are_alone(
    family: Family, seed: int, monkeypatch: pytest.MonkeyPatch
):
    rng = np.random.default_rng(seed)
    few = seed % 2 == 1  # all of them fit a part
    choices = family.tables if few else family.tables + OTHERS
    asked = [drawn(rng, choices, family.config, i) for i in range(4 if few else 12)]
    ahead = packed_ahead(family.shared, monkeypatch)
    _, states = finish(family.shared, asked, updates=("later", "every", "none")[seed % 3])
    assert list(map(result, states)) == told_of(family.alone, asked)
    if few:
        assert sum(ahead) > len(ahead) // 2


def test_a_request_alone_waits_for_results_at_the_ends_of_blocks_only(
    family: Family, monkeypatch: pytest.MonkeyPatch
):
    sampling = SamplingParams(gen_length=12, block_length=6, cache="dual", early_stop=False)
    ahead = packed_ahead(family.shared, monkeypatch)
    finish(family.shared, [generation_request(0, np.arange(1, 6), sampling, family.config)])
    assert ahead == [True] * 10  # a refresh and five reuses a block


def until_ahead(family: Family, asked: Sequence[Request], then: Callable[[Engine], None]) -> list[Ended]:
    """How requests ended, where something happens once some of them wait for tokens of a part in flight."""
    engine, ended, done = family.shared, list[Ended](), False
    for request in asked:
        engine.add(request.spec, deliver=lambda x: ended.append(x) if isinstance(x, Ended) else None)
    submit = engine.runner.submit

    def watched(kind: Kind, requests: list[Request], max_steps: int) -> Any:
        nonlocal done
        if not done and any(request.awaited for request in requests) and len(requests) > 1:
            done = True
            then(engine)
        return submit(kind, requests, max_steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "submit", watched)
        while not engine.idle:
            engine.step()
    assert done
    return ended


def some(family: Family, count: int = 4) -> list[Request]:
    sampling = SamplingParams(gen_length=12, block_length=6, cache="dual", early_stop=False)
    return [generation_request(i, np.arange(1, 6 + i), sampling, family.config) for i in range(count)]


def test_a_part_that_cannot_be_packed_ahead_is_packed_later(family: Family):
    """Its requests end like the others."""

    def refuse(engine: Engine) -> None:
        raise RuntimeError("nothing can be packed now")

    ended = until_ahead(family, some(family), refuse)
    assert all(x.error is None for x in ended)
    expected = {tuple(tokens): steps for tokens, _, steps in told_of(family.alone, some(family))}
    assert {tuple(x.state.tokens.tolist()): x.state.steps for x in ended} == expected


def test_a_failure_ends_the_requests_of_its_part_and_no_other(
    family: Family, monkeypatch: pytest.MonkeyPatch
):
    """A part fails while the next one waits for its tokens; a request that comes later is as alone."""
    engine = family.shared
    collect = engine.runner.collect

    def failing(pending: Any) -> Any:
        monkeypatch.setattr(engine.runner, "collect", collect)
        collect(pending)
        raise RuntimeError("the part failed")

    ended = until_ahead(
        family, some(family), lambda _: monkeypatch.setattr(engine.runner, "collect", failing)
    )
    assert {str(x.error) for x in ended} <= {"None", "the part failed"}
    assert any(x.error is not None for x in ended)
    later = some(family, 2)
    assert [result(x) for x in finish(engine, later)[1]] == told_of(family.alone, later)


def test_who_is_aborted_ahead_changes_nothing_for_others(family: Family):
    asked = some(family)

    def abort(engine: Engine) -> None:
        engine.abort(engine.scheduler.running[0])

    ended = until_ahead(family, asked, abort)
    expected = told_of(family.alone, asked)
    assert [result(x.state) for x in ended if x.error is None] == [
        found for found in expected if found[0] in [x.state.tokens.tolist() for x in ended]
    ]
    assert len(ended) == len(asked) - 1
