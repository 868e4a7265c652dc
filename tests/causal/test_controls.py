"""Controls of logits of causal requests, against greedy tokens that are chosen one by one."""

from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from tests.causal.running import FREE, Build, Oracle, answers, prompt, run

STOPS = (5, 9)


def controlled(oracle: Oracle, ids: np.ndarray, sampling: SamplingParams, ends: tuple[int, ...]) -> list[int]:
    """Greedy tokens: ids that may not be chosen have no logit, and others their bias."""
    tokens, most = list(ids), sampling.max_tokens
    assert most is not None
    for step in range(most):
        scores = oracle(np.array(tokens)).astype(np.float64)
        for id, by in (sampling.logit_bias or {}).items():
            scores[id] += by
        if sampling.allowed_token_ids is not None:
            scores[[i for i in range(len(scores)) if i not in sampling.allowed_token_ids]] = -np.inf
        if step < sampling.min_tokens:
            scores[list(ends)] = -np.inf
        seen, by = np.unique(tokens), sampling.repetition_penalty
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * by, scores[seen] / by)
        tokens.append(int(scores.argmax()))
        if tokens[-1] in ends and sampling.early_stop:
            break
    return tokens[len(ids) :]


ASKED: dict[str, dict[str, Any]] = {
    "biased": {"logit_bias": {249: -100, 301: 4, **dict.fromkeys(range(200), 0.75)}},
    "allowed": {"allowed_token_ids": range(30, 60)},
    "minimum": {"min_tokens": 18, "logit_bias": {5: 100}, "stop_token_ids": STOPS},
    "all": {
        "allowed_token_ids": range(90),
        "logit_bias": dict.fromkeys(range(40), -3.0),
        "min_tokens": 3,
        "stop_token_ids": STOPS,
        "repetition_penalty": 1.4,
    },
    "free": {},
}


def test_each_in_the_company_of_the_others(build: Build, config: ModelConfig, oracle: Oracle):
    """Through several parts of a decode; a prompt's pages are shared whatever is asked of it."""
    ids = prompt(70)
    asked = [SamplingParams(max_tokens=20, early_stop=False, **own) for own in ASKED.values()]
    ends = {name: (*config.stop_ids, *SamplingParams(**own).stop_token_ids) for name, own in ASKED.items()}
    expected = [controlled(oracle, ids, each, end) for each, end in zip(asked, ends.values(), strict=True)]
    found = answers(run(build(), [(ids, sampling) for sampling in asked], config))
    assert found == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert 5 not in found[2][:18]
    assert found[2][18:] == [5, 5]


def without_words(oracle: Oracle, ids: np.ndarray, words: list[tuple[int, ...]], count: int) -> list[int]:
    """Greedy tokens, each the likeliest that completes no word."""
    tokens = ids.tolist()
    for _ in range(count):
        scores = oracle(np.array(tokens)).astype(np.float64)
        for *before, last in words:
            if tokens[len(tokens) - len(before) :] == before:
                scores[last] = -np.inf
        tokens.append(int(scores.argmax()))
    return tokens[len(ids) :]


def test_words_never_come(build: Build, config: ModelConfig, oracle: Oracle):
    """Words that the model would write, of one token and of several, some begun in the prompt; through parts
    of a decode, of which the host sees each before the next one is packed, and in company."""
    ids = prompt(50, seed=4)
    free = answers(run(build(), [(ids, FREE.changed(max_tokens=40))], config))[0]
    words = [(free[2],), (free[6], free[7]), tuple(free[9:13]), (int(ids[-1]), free[0])]
    worst = [*words, *[(free[3], other) for other in range(100)]]
    asked = [FREE.changed(max_tokens=40, bad_words=own) for own in (words, worst)]
    both = run(build(), [(ids, asked[0]), (ids, FREE), (ids, asked[1])], config)
    found = answers(both)
    assert found[0] == without_words(oracle, ids, words, 40)
    assert found[2] == without_words(oracle, ids, worst, 40)
    assert found[1] == free[: len(found[1])]
    for own, text in ((words, found[0]), (worst, found[2])):
        whole = [*ids.tolist(), *text]
        for word in own:
            assert all(tuple(whole[at : at + len(word)]) != word for at in range(len(ids) - 1, len(whole)))


def test_the_text_ends_behind_the_minimum(build: Build, config: ModelConfig, oracle: Oracle):
    ids = prompt(30, seed=2)
    own = {"min_tokens": 4, "logit_bias": {5: 100.0}, "stop_token_ids": STOPS}
    asked = [SamplingParams(max_tokens=12, **own), FREE]
    [request, free] = run(build(), [(ids, sampling) for sampling in asked], config)
    expected = controlled(oracle, ids, asked[0], (*config.stop_ids, *STOPS))
    generated = request.tokens[request.returned][: request.known - len(ids)].tolist()
    assert generated[:5] == expected
    assert expected[4] == 5
    assert 5 not in expected[:4]
    assert answers([free]) == answers(run(build(), [(ids, FREE)], config))


@pytest.mark.slow
def test_draws_are_those_of_the_allowed_ids(build: Build, config: ModelConfig):
    asked = SamplingParams(max_tokens=40, temperature=3.0, allowed_token_ids=(11, 12, 13), early_stop=False)
    [request] = run(build(), [(prompt(9), asked.changed(seed=3))], config)
    assert set(answers([request])[0]) == {11, 12, 13}
