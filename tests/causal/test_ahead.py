"""Decodes that are submitted before the tokens of the decode before have been seen."""

from typing import Any

import jax
import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.serving.causal.request import causal_spec
from jdllm.serving.demands import Kind
from jdllm.serving.request import Request
from jdllm.serving.updates import Ended
from tests.causal.running import Build, Oracle, greedy, prompt, run
from tests.evaluations import note_parts

MOST = 40
"""Tokens of a request: two decodes and a half."""


def generated(request: Request) -> list[int]:
    return request.tokens[len(request.prompt) : request.known].tolist()


def test_a_decode_waits_for_no_tokens_but_the_first(
    build: Build, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    engine = build()
    found = note_parts(engine, Kind.DECODE, monkeypatch)
    run(engine, [(prompt(9), SamplingParams(max_tokens=MOST, early_stop=False))], config)
    assert found == [(1, 0), (1, 1), (1, 1)]


def test_tokens_that_a_decode_leaves_never_come_to_the_host(build: Build):
    """Numbers that an executable takes from the host are put together there: the host would wait."""
    sequences = [program.args[1] for program in build().programs() if program.name.startswith("decode")]
    assert sequences
    assert all(isinstance(asked.left, jax.Array) for asked in sequences)


@pytest.mark.slow
def test_tokens_are_those_of_evaluations_of_everything(
    build: Build, config: ModelConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
):
    """Texts end in different steps, at a stop id or not at all; prompts end in pages and at their edge."""
    prompts = [prompt(n) for n in (5, 60, 64, 130)]
    whole = [greedy(oracle, ids, MOST) for ids in prompts]
    stops = [whole[0][2], whole[1][20], 0, whole[3][35]]
    asked = [
        (ids, SamplingParams(max_tokens=MOST, stop_token_ids=(stop,)))
        for ids, stop in zip(prompts, stops, strict=True)
    ]
    expected = []
    for tokens, (_, sampling) in zip(whole, asked, strict=True):
        ends = (*config.stop_ids, *sampling.stop_token_ids)
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), MOST)
        expected.append(tokens[:end])
    engine = build()
    found = note_parts(engine, Kind.DECODE, monkeypatch)
    assert [generated(request) for request in run(engine, asked, config)] == expected
    assert any(waiting for _, waiting in found)
    assert [generated(request) for request in run(engine, asked[:1], config)] == expected[:1]


@pytest.mark.slow
def test_company_and_draws_change_nothing(build: Build, config: ModelConfig):
    """Some have filters, and one a penalty, which waits for every token."""
    options: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"presence_penalty": 0.5}, {"temperature": 0.0}]
    asked = [
        (prompt(7 + 30 * i), SamplingParams(**{"temperature": 0.9, "seed": i, "max_tokens": MOST} | given))
        for i, given in enumerate(options)
    ]
    alone = [generated(run(build(), [one], config)[0]) for one in asked]
    assert [generated(request) for request in run(build(), asked, config)] == alone
    assert [generated(request) for request in run(build(), asked[::-1], config)] == alone[::-1]


@pytest.mark.slow
def test_who_is_aborted_or_fails_changes_nothing_for_others(build: Build, config: ModelConfig):
    sampling = SamplingParams(max_tokens=MOST, early_stop=False)
    [expected] = run(build(), [(prompt(50), sampling)], config)
    engine, ended = build(), list[Ended]()
    first = engine.add(causal_spec(prompt(20), sampling, config))
    engine.add(
        causal_spec(prompt(50), sampling, config),
        deliver=lambda update: ended.append(update) if isinstance(update, Ended) else None,
    )
    while not engine.scheduler.running or engine.entries[first].steps < MOST // 2:
        engine.step()
    engine.abort(first)
    # Whoever comes now may get the pages of the aborted one, while a decode of it is in flight.
    [other] = run(engine, [(prompt(50), sampling)], config)
    while not engine.idle:
        engine.step()
    np.testing.assert_array_equal(other.tokens, expected.tokens)
    [end] = ended
    np.testing.assert_array_equal(end.state.tokens, expected.tokens)
