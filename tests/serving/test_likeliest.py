"""The likeliest ids beside each token: those of float64, at the step that committed it, in any company."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.outputs import RequestOutput
from tests.conftest import BUDGET
from tests.engines import engine_of, finish, generation_request
from tests.pallas.masked_rows import kept

PROMPTS = [np.random.default_rng(n).integers(0, 500, 5 + n) for n in range(4)]


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"gen_length": 8, "early_stop": False, "return_history": True, **options})


LLADA = [
    sampled(logprobs=20),
    sampled(logprobs=5, temperature=1.0, seed=3, block_length=4, top_p=0.6),
    sampled(logprobs=1, cfg_scale=0.7, transfer="threshold", threshold=0.3),
    sampled(logprobs=True, top_k=7, temperature=0.5),
]
DREAM = [
    sampled(logprobs=20, alg="maskgit_plus", temperature=0.7, top_k=9, seed=5, steps=3),
    sampled(logprobs=4, alg="entropy", steps=5),
    sampled(alg="origin", steps=4),
    sampled(logprobs=3),
]
"""Of the last but one nothing is reported."""


def measured(model: LLM, rows: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """float64 log-probabilities of one position, in the distribution that its confidence is measured on."""
    rows = rows.astype(np.float64)
    if sampling.bans_undefined:
        rows[[mask_of(model), *range(model.config.defined_ids, len(rows))]] = -np.inf
    if sampling.alg is not None:
        rows = rows / (sampling.temperature or 1)
        inside = kept(rows, sampling.top_p or 2, sampling.top_k or len(rows), sampling.min_p or 0)
        rows = np.where(inside, rows, -np.inf)
    return rows - np.logaddexp.reduce(rows)


def mask_of(model: LLM) -> int:
    assert model.config.mask_id is not None
    return model.config.mask_id


def evaluated(model: LLM, tokens: np.ndarray) -> np.ndarray:
    """Logits of the token at each position."""
    rows = model.logits(tokens[None])[0]
    return np.concatenate([rows[:1], rows[:-1]]) if model.config.logits_shift else rows


def check(model: LLM, prompt: np.ndarray, sampling: SamplingParams, output: RequestOutput) -> None:
    if sampling.logprobs is None:
        assert output.top_logprobs is output.committed_in is None
        return
    assert output.history is not None
    assert output.committed_in is not None
    assert output.logprobs is not None
    mask = mask_of(model)
    start = np.concatenate([prompt, np.full(sampling.gen_length, mask)])
    states, masked = [start, *output.history], start == mask
    for step, (before, after) in enumerate(zip(states, output.history, strict=False)):
        rows = evaluated(model, before)
        if sampling.cfg_scale:
            unguided = evaluated(model, np.where(masked, before, mask))
            rows = unguided + (sampling.cfg_scale + 1) * (rows - unguided)
        for position in np.flatnonzero(before != after):
            place, exact = position - len(prompt), measured(model, rows[position], sampling)
            assert output.committed_in[place] == step
            top = None if output.top_logprobs is None else output.top_logprobs[place]
            check_position(exact, int(after[position]), output.logprobs[place], top, sampling.listed)


def check_position(
    exact: np.ndarray, token: int, logprob: float | None, top: dict[int, float] | None, count: int
) -> None:
    assert logprob == pytest.approx(exact[token], abs=1e-4)
    if not count:
        assert top is None
        return
    order = np.lexsort((np.arange(len(exact)), -exact))[:count]
    order = [id for id in order.tolist() if exact[id] > -np.inf]
    assert top is not None
    assert list(top) == [*order, *([] if token in order else [token])]
    assert list(top.values()) == pytest.approx(exact[list(top)], abs=1e-4)
    assert top[token] == logprob


@pytest.mark.slow
@pytest.mark.parametrize(("family", "asked"), [("stopping_llm", LLADA), ("dream_llm", DREAM)])
def test_every_position_equals_float64(
    family: str, asked: Sequence[SamplingParams], request: pytest.FixtureRequest
):
    model: LLM = request.getfixturevalue(family)
    outputs = model.generate(prompt_token_ids=PROMPTS, sampling=list(asked))
    for prompt, sampling, output in zip(PROMPTS, asked, outputs, strict=True):
        check(model, prompt, sampling, output)


@pytest.mark.slow
def test_asking_changes_no_token_and_company_nothing(stopping_llm: LLM):
    """With a cache too, whose refresh is exact."""
    cached = sampled(logprobs=4, cache="dual", block_length=4)
    asked = [cached, cached.changed(logprobs=None), LLADA[1], LLADA[1].changed(logprobs=None)]
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    together = stopping_llm.generate(prompt_token_ids=prompts, sampling=asked)
    assert together[0].token_ids == together[1].token_ids
    assert together[2].token_ids == together[3].token_ids
    [alone] = stopping_llm.generate(prompt_token_ids=prompts[:1], sampling=cached)
    assert alone.token_ids == together[0].token_ids
    for mine, theirs in zip(tops(alone), tops(together[0]), strict=True):
        assert list(mine) == list(theirs)
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert alone.committed_in is not None
    assert alone.logprobs is not None
    place = alone.committed_in.index(0)
    start = np.concatenate([PROMPTS[0], np.full(8, mask_of(stopping_llm))])
    exact = measured(stopping_llm, evaluated(stopping_llm, start)[len(PROMPTS[0]) + place], cached)
    check_position(exact, alone.token_ids[place], alone.logprobs[place], tops(alone)[place], 4)


def tops(output: RequestOutput) -> list[dict[int, float]]:
    return [top for top in output.top_logprobs or [] if top is not None]


@pytest.mark.parametrize("updates", ["every", pytest.param("later", marks=pytest.mark.slow)])
def test_updates_tell_them_of_what_is_committed(
    updates: Any, params: Params, config: ModelConfig, executables: Executables
):
    asked = [generation_request(n, PROMPTS[n], sampling, config) for n, sampling in enumerate(LLADA[:2])]
    asked.append(generation_request(2, PROMPTS[2], sampled(cache="dual"), config))
    told, requests = finish(engine_of(params, config, executables, BUDGET), asked, updates=updates)
    for number, request in enumerate(requests):
        steps = [update for update in told if update.request == number]
        assert sum(int(update.committed.sum()) for update in steps) == 8
        for update in steps:
            assert update.likeliest.shape == (len(update.positions), request.sampling.listed)
            at = update.positions[update.committed]
            np.testing.assert_array_equal(update.likeliest[update.committed], request.likeliest[at])
