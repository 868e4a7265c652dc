"""After the ladder is compiled, nothing compiles."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import Cache, SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.denoise.cached_runner import CachedRunner, RefreshForm
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from tests.decoding.adaptive_models import CAUSAL, DREAM, MASK, tiny
from tests.engines import engine_of, finish, generation_request, infill_request

CHOICES: list[dict[str, Any]] = [
    {},
    {"cache": "dual"},
    {"cache": "head_sparse", "retention": 0.4, "refresh_delay": 0},
    {"cache": "selective", "refresh_interval": 3},
    {"cache": "sparse", "transfer": "threshold", "threshold": 0.2},
    {"cfg_scale": 0.5},
    {"temperature": 0.7, "top_p": 0.8},
    {"cache": "prefix", "transfer": "margin", "min_p": 0.1, "temperature": 1.0},
    {"transfer": "entropy_bound"},
    {"alg": "entropy", "steps": 5},
]


def drawn(rng: np.random.Generator, most: int) -> tuple[np.ndarray, SamplingParams]:
    length = int(rng.integers(2, most))
    blocks, block = int(rng.integers(1, 3)), int(rng.integers(1, 9))
    options = dict(CHOICES[rng.integers(len(CHOICES))])
    if "alg" in options:
        blocks = 1
    prompt = rng.integers(1, 200, max(1, length - blocks * block))
    given: dict[str, Any] = {"gen_length": blocks * block, "block_length": block, "seed": 1, **options}
    if "alg" in options:
        del given["block_length"]
    return prompt, SamplingParams(**given)


@pytest.fixture(autouse=True)
def _one_ladder() -> Iterator[None]:
    """The executables of an engine, which is a cycle, go before the next test compiles a ladder of its own: a
    process has too few mappings for several."""
    yield
    gc.collect()


@pytest.mark.slow
def test_requests_of_any_kind_compile_nothing(params: Params, config: ModelConfig):
    executables = Executables("cpu")
    engine = engine_of(params, config, executables, 256)
    engine.warm()
    compiled = len(executables)
    assert compiled == len(engine.programs()) <= 48
    rng = np.random.default_rng(0)
    for _ in range(10):
        asked = [generation_request(i, *drawn(rng, 120), config) for i in range(20)]
        finish(engine, asked)
    caches: tuple[Cache, ...] = ("none", "dual")
    for cache in caches:
        many = SamplingParams(gen_length=2, cache=cache)  # more than a request for each 128 rows
        finish(engine, [generation_request(i, np.array([5]), many, config) for i in range(64)])
        long = SamplingParams(gen_length=200, steps=4, cache=cache)  # a block of most rows
        finish(engine, [generation_request(0, np.array([5]), long, config)])
    assert len(executables) == compiled


def refreshed_by(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[RefreshForm]:
    """A list of the forms of refreshes, which grows with each refresh."""
    cached = engine.parts.compiled[1]
    assert isinstance(cached, CachedRunner)
    forms: list[RefreshForm] = []

    def counted(form: RefreshForm, choose: Any) -> Any:
        return lambda *args: (forms.append(form), choose(*args))[1]

    for form, kind in cached.refresh_sizes.items():
        monkeypatch.setattr(kind, "choose", counted(form, kind.choose))
    return forms


@pytest.mark.slow
def test_tokens_are_the_same_with_and_without_a_warm_up(params: Params, config: ModelConfig):
    """A warm-up compiles single steps of their own, which serve requests that are out of step."""
    rng = np.random.default_rng(0)
    asked = [
        (rng.integers(0, 50, 10 + block), SamplingParams(gen_length=12, block_length=block, cache=cache))
        for block, cache in ((4, "dual"), (6, "head_sparse"), (12, "prefix"))
    ]
    tokens: list[list[list[int]]] = []
    for warmed in (True, False):
        engine = engine_of(params, config, Executables("cpu"), 128)
        if warmed:
            engine.warm()
        requests = [generation_request(i, *each, config) for i, each in enumerate(asked)]
        tokens.append([request.tokens.tolist() for request in finish(engine, requests)[1]])
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_refreshes_are_usual_where_all_requests_of_a_part_are(
    params: Params, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    """Requests of any kind have the same tokens in company as alone."""
    engine = engine_of(params, config, Executables("cpu"), 256)
    forms = refreshed_by(engine, monkeypatch)
    usual = {"cache": "head_sparse", "gen_length": 8, "steps": 8}
    others = [{"gen_length": 40, "steps": 8}, {"pool_kernel": 17}, {"temperature": 1.0, "top_p": 0.9}]

    def tokens(*asked: dict[str, Any]) -> list[list[int]]:
        forms.clear()
        requests = [
            generation_request(i, np.arange(40), SamplingParams(**usual | own), config)
            for i, own in enumerate(asked)
        ]
        return [request.tokens.tolist() for request in finish(engine, requests)[1]]

    (alone,) = tokens({})
    assert {form.usual for form in forms} == {True}
    for own in others:
        (unusual,) = tokens(own)
        assert {form.usual for form in forms} == {False}
        assert tokens({}, own) == [alone, unusual]


@pytest.mark.slow
def test_keys_are_scored_only_where_some_are_stored(
    params: Params, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    engine = engine_of(params, config, Executables("cpu"), 256)
    forms = refreshed_by(engine, monkeypatch)

    def tokens(**options: Any) -> list[int]:
        sampling = SamplingParams(gen_length=16, block_length=8, **options)
        forms.clear()
        return finish(engine, [generation_request(0, np.arange(40), sampling, config)])[1][0].tokens.tolist()

    alone = tokens(cache="head_sparse", refresh_delay=1)
    assert [form.scored for form in forms] == [True] * 4  # nothing is compiled for the step before a refresh
    tokens(cache="dual")
    assert [form.scored for form in forms] == [False] * 2
    assert tokens(cache="head_sparse", refresh_delay=1) == alone
    assert [form.scored for form in forms] == [False, True] * 2


def drawn_adaptive(rng: np.random.Generator, number: int) -> Request:
    """A generation, or an infill whose masks lie anywhere, with a cache or without."""
    caches: tuple[Cache, ...] = ("none", "prefix", "dual", "selective", "prompt")
    block = int(rng.integers(1, 20))
    sampling = SamplingParams(
        gen_length=block * int(rng.integers(1, 3)),
        block_length=block,
        transfer="adaptive",
        cache=caches[rng.integers(len(caches))],
        max_lookahead=int(rng.integers(1, 40)),
        temperature=float(rng.choice([0.0, 1.0])),
        logprobs=int(rng.choice([0, 3])),
        seed=number,
    )
    tokens = rng.integers(1, 200, int(rng.integers(1, 180)))
    if rng.integers(2):
        return generation_request(number, tokens[:80], sampling, DREAM)
    tokens[rng.random(len(tokens)) < rng.choice([0.05, 0.9])] = MASK
    tokens[-1] = MASK
    return infill_request(number, tokens, sampling, DREAM)


@pytest.mark.slow
def test_adaptive_requests_compile_nothing():
    """Their prompts are read in parts of all sizes, and their windows have holes."""
    executables = Executables("cpu")
    verifier = Verifier(tiny(CAUSAL).params(), CAUSAL)
    engine = engine_of(tiny(DREAM).params(), DREAM, executables, 256, verifier=verifier)
    engine.warm()
    compiled = len(executables)
    assert compiled == len(engine.programs()) <= 56
    rng = np.random.default_rng(0)
    for count in (1, 1, 1, 4, 20, 20, 20):
        adaptive = [drawn_adaptive(rng, i) for i in range(count)]
        others = [generation_request(0, *drawn(rng, 120), DREAM) for _ in range(count // 4)]
        finish(engine, [*adaptive, *others])
    for cache in ("none", "dual"):
        short = SamplingParams(gen_length=2, transfer="adaptive", cache=cache)
        finish(engine, [generation_request(i, np.array([5]), short, DREAM) for i in range(64)])
        long = SamplingParams(gen_length=200, transfer="adaptive", cache=cache, max_lookahead=200)
        finish(engine, [generation_request(0, np.array([5]), long, DREAM)])
    assert len(executables) == compiled
