"""What a causal request asks of the sampler, against the rules written out."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.serving.causal.request import CausalRequest, causal_spec
from tests.causal.running import FREE, Build, Oracle, answers, prompt, run


def penalised(oracle: Oracle, ids: np.ndarray, count: int, penalty: float) -> list[int]:
    """Greedy tokens by Hugging Face's rule."""
    tokens = list(ids)
    for _ in range(count):
        scores = oracle(np.array(tokens)).astype(np.float64)
        seen = np.unique(tokens)
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        tokens.append(int(scores.argmax()))
    return tokens[len(ids) :]


@pytest.mark.slow
def test_repetition_penalty(build: Build, config: ModelConfig, oracle: Oracle):
    ids, other = prompt(40), prompt(90)
    asked = [
        (ids, SamplingParams(repetition_penalty=1.6, max_tokens=20, early_stop=False)),
        (other, FREE),
        (other, SamplingParams(repetition_penalty=0.6, max_tokens=20, early_stop=False)),
    ]
    found = answers(run(build(), asked, config))
    assert found[0] == penalised(oracle, ids, 20, 1.6)
    assert found[1] == answers(run(build(), [(other, FREE)], config))[0]
    assert found[2] == penalised(oracle, other, 20, 0.6)
    assert found[0] != penalised(oracle, ids, 20, 1.0)


def counted(oracle: Oracle, ids: np.ndarray, count: int, sampling: SamplingParams) -> list[int]:
    """Greedy tokens by OpenAI's rule, behind Hugging Face's."""
    tokens = list(ids)
    for _ in range(count):
        scores = oracle(np.array(tokens)).astype(np.float64)
        seen, by = np.unique(tokens), sampling.repetition_penalty
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * by, scores[seen] / by)
        counts = np.bincount(tokens[len(ids) :], minlength=len(scores))
        scores -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        tokens.append(int(scores.argmax()))
    return tokens[len(ids) :]


@pytest.mark.slow
def test_penalties_of_what_was_generated(build: Build, config: ModelConfig, oracle: Oracle):
    """Each in the company of the others; pages of a prompt are shared whatever is asked of it."""
    ids, count = prompt(150), 20
    penalties: list[dict[str, Any]] = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": -1.0},
        {},
        {"presence_penalty": -0.5, "frequency_penalty": 0.75, "repetition_penalty": 1.3},
    ]
    asked = [SamplingParams(max_tokens=count, early_stop=False, **own) for own in penalties]
    engine = build()
    run(engine, [(ids, FREE)], config)
    ended = run(engine, [(ids, sampling) for sampling in asked], config)
    assert [request.found for request in ended if isinstance(request, CausalRequest)] == [128] * 4
    expected = [counted(oracle, ids, count, sampling) for sampling in asked]
    assert answers(ended) == expected
    assert len({tuple(tokens) for tokens in expected}) == 4


@pytest.mark.parametrize(
    "options",
    [{"steps": 4}, {"cache": "dual"}, {"transfer": "threshold"}, {"cfg_scale": 1.0}, {"prefilling": "dream"}],
    ids=lambda options: next(iter(options)),
)
def test_what_is_for_models_that_denoise(config: ModelConfig, options: dict[str, Any]):
    with pytest.raises(RequestError, match=next(iter(options))):
        causal_spec(prompt(3), SamplingParams(gen_length=8, **options), config)


def test_an_empty_prompt_needs_a_token_that_begins_texts(config: ModelConfig):
    without = dataclasses.replace(config, bos_id=None)
    assert causal_spec([], FREE, dataclasses.replace(config, bos_id=4)).prompt.tolist() == [4]
    assert causal_spec([], FREE, without, bos_id=3).prompt.tolist() == [3]
    with pytest.raises(RequestError, match="the prompt is empty"):
        causal_spec([], FREE, without)
