"""Adaptive parallel decoding with cached drafts, against a slow copy and other rules, alone and together."""

import itertools
from typing import Any, Literal

import jax
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import param_bytes
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.adaptive.verifier_keys import VerifierKeys
from jdllm.serving.demands import Kind
from jdllm.serving.engine import Engine
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended, StepUpdate, Update
from tests.decoding import slow_adaptive
from tests.decoding.adaptive_models import CAUSAL, DREAM, LLADA, MASK, PROMPTS, Pair, pair_of, tiny
from tests.engines import engine_of, generation_request, infill_request

pytestmark = pytest.mark.usefixtures("shared_executables")

SLOW = pytest.mark.slow
ROWS = 256
CACHES = ("prefix", "dual", "selective", "prompt")
MODELS = {"llada": LLADA, "dream": DREAM}


@pytest.fixture(scope="module")
def pairs(shared_executables: None) -> dict[str, Pair]:
    return {name: pair_of(config, max_num_batched_tokens=ROWS) for name, config in MODELS.items()}


def adaptive(**options: Any) -> SamplingParams:
    defaults = {"gen_length": 24, "transfer": "adaptive", "max_lookahead": 6, "return_history": True}
    return SamplingParams(**{**defaults, **options})


def also_slow(*, quick: tuple[str, str]) -> Any:
    """All pairs of a model and a cache, of which one is quick."""
    every = itertools.product(MODELS, CACHES)
    marked = (pytest.param(*pair, marks=() if pair == quick else SLOW) for pair in every)
    return pytest.mark.parametrize(("family", "cache"), list(marked))


@pytest.mark.parametrize(
    ("family", "cache"),
    [("llada", "dual"), *(pytest.param(*p, marks=SLOW) for p in itertools.product(["dream"], CACHES[:3]))],
)
def test_a_refresh_in_every_step_is_exact(family: str, cache: str, pairs: dict[str, Pair]):
    """Each draft, and how much of it is accepted, equals the slow copy of whole sequences."""
    pair = pairs[family]
    greedy = adaptive(cache=cache, refresh_interval=1, block_length=8, mixture_weight=0.8)
    drawn = adaptive(cache=cache, refresh_interval=1, temperature=0.7, mixture_weight=0.7, seed=3)
    asked = [(greedy, PROMPTS[0]), (drawn, PROMPTS[1]), (greedy, PROMPTS[2])]
    updates: list[StepUpdate] = []
    outputs = pair.generate(*map(list, zip(*asked, strict=True)), on_step=updates.append)
    for index, ((sampling, prompt), output) in enumerate(zip(asked, outputs, strict=True)):
        steps = slow_adaptive.decode(pair.models, np.array([*prompt, *[MASK] * 24]), sampling)
        np.testing.assert_array_equal(output.history, [step.sequence for step in steps])
        told = [update for update in updates if update.request == index]
        assert [update.positions.tolist() for update in told] == [step.window for step in steps]
        assert [update.provisional.tolist() for update in told] == [step.draft for step in steps]


@also_slow(quick=("dream", "dual"))
def test_the_draft_is_what_other_rules_choose_from_left_to_right(
    family: str, cache: str, pairs: dict[str, Pair]
):
    """Where the diffusion model alone decides, whole windows are accepted: as many tokens as a quota."""
    pair = pairs[family]
    for window, block, more in ((1, 6, {}), (3, 12, {"refresh_interval": 2}), (4, None, {})):
        options: dict[str, Any] = {"cache": cache, "block_length": block}
        options |= {} if cache == "prompt" else more
        drafts = adaptive(**options, max_lookahead=window, mixture_weight=1.0)
        ordered = SamplingParams(
            **options,
            gen_length=24,
            steps=24 // window,
            transfer="sequential",
            undefined_tokens="banned",
            return_history=True,
        )
        for a, b in zip(pair.generate(drafts), pair.generate(ordered), strict=True):
            np.testing.assert_array_equal(a.history, b.history)


@also_slow(quick=("llada", "prefix"))
def test_the_verifier_accepts_its_own_greedy_continuation(family: str, cache: str, pairs: dict[str, Pair]):
    """Without the diffusion model's share a draft is accepted, behind its first token, as far as the verifier
    would go on with it. The verifier by itself, without any stored keys, says how far this is."""
    pair = pairs[family]
    sampling = adaptive(cache=cache, block_length=12, mixture_weight=0.0, return_history=False)
    updates: list[StepUpdate] = []
    pair.generate(sampling, PROMPTS, on_step=updates.append)
    kinds = pair.llm.engine.stats().parts
    assert kinds[Kind.ADAPTIVE_REUSE] > 0
    texts = [np.array([*prompt, *[MASK] * 24]) for prompt in PROMPTS]
    for update in updates:
        text = texts[update.request]
        text[update.positions] = update.provisional
        last = int(update.positions[-1])
        says = pair.models.verifier(np.minimum(text[:last], MASK)).copy()
        says[:, MASK] = -np.inf
        agrees = says.argmax(axis=1)[update.positions[1:] - 1] == update.provisional[1:]
        assert update.committed.tolist() == [True, *np.cumprod(agrees, dtype=bool).tolist()]
        text[update.positions[~update.committed]] = MASK


@pytest.mark.parametrize("family", [pytest.param("llada", marks=SLOW), "dream"])
def test_masks_with_tokens_between_them(family: str, pairs: dict[str, Pair]):
    """Windows have holes, and the row before a window may lie outside of what a step evaluates."""
    pair = pairs[family]
    sequence = np.arange(40) * 7 % 250
    sequence[[0, 3, 4, 9, 10, 11, 20, 33, 34, 39]] = MASK
    for cache in CACHES[:3]:
        sampling = adaptive(cache=cache, refresh_interval=1, max_lookahead=4, mixture_weight=0.8)
        iterations = slow_adaptive.decode(pair.models, sequence, sampling)
        output = pair.llm.infill(token_ids=[sequence], sampling=sampling)[0]
        np.testing.assert_array_equal(output.history, [step.sequence for step in iterations])


def drawn_request(rng: np.random.Generator, number: int, config: ModelConfig) -> Request:
    """A request of any kind that may run beside others; half of them have cached drafts."""
    prompt = rng.integers(1, 200, int(rng.integers(1, 60)))
    cache: Literal["prefix", "dual", "selective", "prompt"] = CACHES[int(rng.integers(4))]  # pyright: ignore[reportAssignmentType]
    decides = {
        "transfer": "adaptive",
        "max_lookahead": int(rng.integers(1, 12)),
        "mixture_weight": float(rng.choice([0.5, 0.9])),
    }
    choices: list[dict[str, Any]] = [
        {"cache": "dual", "block_length": 4},
        {"cache": "head_sparse", "retention": 0.4, "block_length": 8},
        {"transfer": "threshold", "threshold": 0.2, "cache": "prefix"},
        decides,
        *[{"cache": cache, **decides, "block_length": int(rng.choice([4, 8, 16]))}] * 4,
    ]
    sampling = SamplingParams(
        gen_length=16,
        temperature=float(rng.choice([0.0, 1.0])),
        seed=number,
        return_history=True,
        **choices[int(rng.integers(len(choices)))],
    )
    if rng.integers(4):
        return generation_request(number, prompt, sampling, config)
    tokens = rng.integers(1, 200, 60)
    tokens[rng.random(60) < 0.3] = MASK
    tokens[-1] = MASK
    return infill_request(number, tokens, sampling, config)


def run(engine: Engine, requests: list[Request], rng: np.random.Generator, leave: set[int]) -> list[Request]:
    """Requests that come while others run, of which some leave: those that ended, in their order."""
    ended: dict[int, Ended] = {}

    def deliver(update: Update) -> None:
        if isinstance(update, Ended):
            assert update.error is None, update.error
            ended[update.request] = update

    ids = []
    for index, request in enumerate(requests):
        ids.append(engine.add(request.spec, deliver=deliver))
        for _ in range(int(rng.integers(3))):
            engine.step()
        if index in leave:
            engine.abort(ids[-1])
    while not engine.idle:
        engine.step()
    return [ended[i].state for i in ids if i in ended]


@pytest.mark.parametrize(
    ("family", "count"),
    [("dream", 8), pytest.param("llada", 60, marks=SLOW), pytest.param("dream", 60, marks=SLOW)],
)
def test_company_changes_nothing_and_all_pages_come_back(family: str, count: int, pairs: dict[str, Pair]):
    engine, config = pairs[family].llm.engine, MODELS[family]
    [keys] = [holder for holder in engine.parts.holders if isinstance(holder, VerifierKeys)]
    free = engine.stats().free_pages, keys.pool.book.free_pages
    rng = np.random.default_rng(count)
    for some in itertools.batched(range(count), 20):
        requests = [drawn_request(rng, number, config) for number in some]
        leave = {index for index in range(len(requests)) if rng.random() < 0.2}
        states = run(engine, requests, rng, leave)
        assert (engine.stats().free_pages, keys.pool.book.free_pages) == free
        assert keys.held == 0
        stayed = [request for index, request in enumerate(requests) if index not in leave]
        for request, together in zip(stayed, states, strict=True):
            [alone] = run(engine, [request], rng, set())
            np.testing.assert_array_equal(together.history, alone.history)


@pytest.mark.slow
def test_more_requests_than_the_verifier_has_room_for():
    """A part has as many requests as the verifier's pool has rows for, however few rows each forwards."""
    verifier = Verifier(tiny(CAUSAL).params(), CAUSAL)
    engine = engine_of(tiny(LLADA).params(), LLADA, Executables("cpu"), 128, verifier=verifier)
    [keys] = [holder for holder in engine.parts.holders if isinstance(holder, VerifierKeys)]
    pages = keys.pool.pages
    sampling = SamplingParams(gen_length=4, transfer="adaptive", cache="dual", max_lookahead=1)
    requests = [generation_request(i, np.arange(1, 57), sampling, LLADA) for i in range(5)]
    parts: list[int] = []
    engine.observe = lambda done: parts.append(done.requests) if done.kind is Kind.ADAPTIVE_REUSE else None
    states = run(engine, requests, np.random.default_rng(0), set())
    assert len({tuple(state.tokens.tolist()) for state in states}) == 1
    assert max(parts) == 2
    assert keys.pool.pages == pages


class TestRefusals:
    @pytest.mark.parametrize("cache", ["sparse", "head_sparse"])
    def test_caches_that_keep_the_best_rows(self, cache: Any):
        with pytest.raises(
            RequestError, match=f"'{cache}' keeps the best only: choose another cache, such as"
        ):
            adaptive(cache=cache)

    def test_more_tokens_than_the_verifier_has_room_for(self, pairs: dict[str, Pair]):
        engine = pairs["llada"].llm.engine
        before = engine.stats()
        request = generation_request(0, np.arange(1, 250), adaptive(cache="dual"), LLADA)
        with pytest.raises(RequestError, match=f"room for sequences of {ROWS} tokens, and this one has 273"):
            engine.add(request.spec)
        assert engine.stats() == before

    def test_no_verifier(self):
        engine = engine_of(tiny(LLADA).params(), LLADA, Executables("cpu"), 128)
        with pytest.raises(RequestError, match="'adaptive' needs an autoregressive verifier"):
            engine.add(generation_request(0, np.arange(1, 5), adaptive(cache="dual"), LLADA).spec)

    def test_pages_that_the_pool_has_not(self):
        """No other way of caching takes the place of the pool."""
        verifier = Verifier(tiny(CAUSAL).params(), CAUSAL)
        engine = engine_of(tiny(LLADA).params(), LLADA, Executables("cpu"), 512, pages=2, verifier=verifier)
        request = generation_request(0, np.arange(1, 200), adaptive(cache="dual"), LLADA)
        with pytest.raises(RequestError, match="needs 4 pages of the KV pool, which has 1"):
            engine.add(request.spec)


@pytest.mark.slow
def test_the_account_counts_both_pools():
    weights = sum(param_bytes(config, "float32") for config in (LLADA, CAUSAL))
    memory = weights + (96 << 20)
    llm = LLM(tiny(LLADA), verifier=tiny(CAUSAL), memory=memory, host_memory="0", max_num_batched_tokens=512)
    rows = dict(llm.account.table())
    assert sum(rows.values()) == memory
    assert rows["KV pool"] == llm.account.pages * llm.account.page_bytes
    [keys] = [holder for holder in llm.engine.parts.holders if isinstance(holder, VerifierKeys)]
    held = sum(x.nbytes for x in jax.tree.leaves(keys.pool.device()))
    assert rows["verifier"] == param_bytes(CAUSAL, "float32") + held
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling=adaptive(cache="dual", block_length=8))
    assert all(len(output.token_ids) == 24 for output in outputs)
