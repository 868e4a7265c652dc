"""What a verifier has stored of requests, and what it evaluates of them."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array

from jdllm.decoding.sampling import Cache, SamplingParams
from jdllm.execution.paged.pool import PAGE_ROWS
from jdllm.llm import LLM
from jdllm.models.weights import abstract_params
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.adaptive.verifier_keys import Spans, VerifierKeys, verifier_keys_bytes
from jdllm.serving.demands import Kind
from jdllm.serving.launch import Launch
from jdllm.serving.request import Request
from jdllm.serving.spec import generation_spec
from jdllm.serving.updates import Ended
from tests.decoding.adaptive_models import CAUSAL, DREAM, LLADA, MASK, tiny
from tests.engines import infill_request

VERIFIER = Verifier(abstract_params(CAUSAL, "float32"), CAUSAL)
SAMPLING = SamplingParams(transfer="adaptive", max_lookahead=3)


def infill(number: int, tokens: list[int]) -> Request:
    return infill_request(number, np.array(tokens), SAMPLING, LLADA)


def committing(request: Request, count: int) -> None:
    request.tokens[request.candidates()[:count]] = 7


def test_only_new_rows_are_evaluated():
    keys, request = VerifierKeys(VERIFIER, 512), infill(0, [1, 2, 3, MASK, MASK, MASK, MASK, 4, 5, MASK])
    spans = keys.hold([request])
    assert spans == [Spans(range(2), range(2, 5))]
    keys.stored([request], spans)
    committing(request, 2)
    spans = keys.hold([request])
    assert spans == [Spans(range(4, 4), range(4, 9))]
    keys.stored([request], spans)
    committing(request, 2)
    spans = keys.hold([request])
    assert spans == [Spans(range(8, 8), range(8, 9))]


def test_what_lies_behind_an_accepted_window_is_read_later():
    keys, request = VerifierKeys(VERIFIER, 512), infill(0, [1, MASK, MASK, MASK, 2, 3, 4, MASK])
    keys.stored([request], keys.hold([request]))
    committing(request, 3)
    assert keys.hold([request]) == [Spans(range(3, 6), range(6, 7))]


@pytest.mark.slow
@given(st.data())
def test_every_row_that_is_seen_was_evaluated_with_its_last_token(data: st.DataObject):
    """Brute force: which token each stored row was evaluated with, and what it saw then."""
    keys = VerifierKeys(VERIFIER, 1)
    requests = [
        infill(
            i,
            [MASK if data.draw(st.booleans()) else t for t in range(data.draw(st.integers(0, 11)))] + [MASK],
        )
        for i in range(data.draw(st.integers(1, 4)))
    ]
    stored: dict[int, list[tuple[int, ...]]] = {}
    while True:
        left = [r for r in requests if (r.tokens == MASK).any()]
        if not left:
            return
        some = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        match data.draw(st.sampled_from(["step", "step", "step", "clear", "forget"])):
            case "clear":
                keys.clear()
            case "forget":
                keys.forget(some[0].id)
        spans = keys.hold(some)
        for request, span in zip(some, spans, strict=True):
            window = request.candidates()
            drafted = request.tokens.copy()
            drafted[window] = np.array([data.draw(st.integers(100, 103)) for _ in window])
            seen = stored.setdefault(request.id, [()] * len(drafted))
            for rows, tokens in ((span.unread, request.tokens), (span.window, drafted)):
                for row in rows:
                    seen[row] = tuple(tokens[: row + 1])
            assert max(window[0] - 1, 0) in span.window
            assert max(window[-1] - 1, 0) in span.window
            for row in range(span.window.stop):
                assert seen[row] == tuple(drafted[: row + 1])
            accepted = data.draw(st.integers(1, len(window)))
            request.tokens[window[:accepted]] = drafted[window[:accepted]]
        keys.stored(some, spans)


def test_others_lose_their_pages_before_a_step_waits():
    keys = VerifierKeys(VERIFIER, 4096)
    first = [infill(i, [1] * 40 + [MASK]) for i in range(keys.pool.pages)]
    for half in (first[:50], first[50:]):
        keys.stored(half, keys.hold(half))
    keys.hold(first[:1])
    keys.hold([infill(1000, [1, MASK])])
    assert keys.hold(first[:1])[0].unread == range(39, 39)
    assert keys.hold(first[1:2])[0].unread == range(39)


def test_a_longer_request_gets_a_larger_pool_and_the_next_one_the_usual():
    keys = VerifierKeys(VERIFIER, 256)
    usual, long = keys.pool.pages, infill(0, [1] * (90 * PAGE_ROWS) + [MASK])
    keys.hold([long])
    assert keys.pool.pages >= 91
    page = verifier_keys_bytes(VERIFIER, PAGE_ROWS) - verifier_keys_bytes(VERIFIER, 0)
    assert keys.beyond_plan == page * (keys.pool.pages - usual)
    keys.hold([infill(1, [1, MASK])])
    assert keys.pool.pages == usual
    assert keys.beyond_plan == 0


def keys_of(llm: LLM) -> VerifierKeys:
    """What the verifier has stored."""
    [keys] = [holder for holder in llm.engine.parts.holders if isinstance(holder, VerifierKeys)]
    return keys


@pytest.mark.slow
def test_an_ended_request_gives_its_pages_back():
    llm = LLM(tiny(DREAM), verifier=tiny(CAUSAL))
    keys = keys_of(llm)
    free = keys.pool.book.free_pages
    llm.generate(prompt_token_ids=[[1, 2], [3]], sampling=SamplingParams(gen_length=6, transfer="adaptive"))
    assert keys.pool.book.free_pages == free


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.slow
def test_prompts_are_read_in_parts(rows: int, monkeypatch: pytest.MonkeyPatch):
    sampling = SamplingParams(gen_length=12, transfer="adaptive", mixture_weight=0.6, max_lookahead=5)
    prompts = [np.arange(n).tolist() for n in (150, 31, 2)]
    expected = LLM(tiny(DREAM), verifier=tiny(CAUSAL)).generate(prompt_token_ids=prompts, sampling=sampling)
    monkeypatch.setattr("jdllm.serving.adaptive.verifying.READ_ROWS", (rows,))
    found = LLM(tiny(DREAM), verifier=tiny(CAUSAL)).generate(prompt_token_ids=prompts, sampling=sampling)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.slow
def test_stored_keys_that_a_failure_took_are_stored_again(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    llm = LLM(tiny(DREAM), verifier=tiny(CAUSAL))
    engine, keys = llm.engine, keys_of(llm)
    sampling = SamplingParams(
        gen_length=12, transfer="adaptive", mixture_weight=0.6, max_lookahead=2, cache=cache
    )
    expected = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling=sampling)[0].token_ids
    updates: list[Any] = []
    kept = engine.add(generation_spec([1, 2, 3], sampling, llm.config), deliver=updates.append)
    for _ in range(4):
        engine.step()

    def failing(requests: list[Request], max_steps: int) -> Launch:
        def run() -> Array:
            for pool in (keys.pool, engine.pool):
                jax.tree.leaves(pool.device())[0].delete()
            raise RuntimeError("the device failed")

        return Launch(run, [request.candidates() for request in requests], [None] * len(requests))

    monkeypatch.setitem(engine.parts.launchers, Kind.FULL, failing)
    plain = SamplingParams(gen_length=4)
    lost = engine.add(generation_spec([4, 5], plain, llm.config), deliver=updates.append)
    while not engine.idle:
        engine.step()
    ended = {u.request: u for u in updates if isinstance(u, Ended)}
    assert str(ended[lost].error) == "the device failed"
    assert ended[kept].error is None
    assert ended[kept].state.tokens[3:].tolist() == expected
