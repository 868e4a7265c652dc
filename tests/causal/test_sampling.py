"""What a causal request asks of the sampler, against the rules written out."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.serving.causal_request import causal_spec
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
