"""Nemotron-Labs-Diffusion scores texts as a causal model does: against recorded logits and answers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from jdllm.errors import RequestError
from jdllm.llm import LLM
from tests.blocks.recorded_nemotron import NEMOTRON, autoregressive_runs

CASES = ("fwd_causal_b1", "fwd_causal_batch")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(NEMOTRON.directory, max_num_batched_tokens=256, kv_pool="8MiB", progress=False) as llm:
        yield llm


def recorded() -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids, and the f64 log-probability of each of them but the first."""
    tensors, texts = NEMOTRON.tensors(), []
    for case in CASES:
        for ids, logits in zip(tensors[f"{case}.input_ids"], tensors[f"{case}.logits"], strict=True):
            rows = log_softmax(logits.astype(np.float64), axis=-1)
            texts.append((ids, rows[np.arange(len(ids) - 1), ids[1:]]))
    return texts


def test_a_likelihood_is_the_sum_over_the_tokens(llm: LLM):
    for begin in (1, 13):
        pairs = [(ids[:begin], ids[begin:]) for ids, _ in recorded()]
        tokens = llm.token_logprobs(pairs)
        for (_, expected), found, one in zip(recorded(), llm.likelihoods(pairs), tokens, strict=True):
            assert found.log_likelihood == pytest.approx(expected[begin - 1 :].sum(), abs=1e-2)
            assert (found.standard_error, found.mc_num) == (0.0, 1)
            assert [token.logprob for token in one] == pytest.approx(expected[begin - 1 :], abs=5e-4)


def test_recorded_answers_are_the_best(llm: LLM):
    runs = autoregressive_runs()
    found = llm.token_logprobs([(run.prompt, run.output) for run in runs])
    for run, tokens in zip(runs, found, strict=True):
        assert [token.best for token in tokens] == run.output


def test_shares_are_those_of_option_and_suffix_together(llm: LLM):
    (ids, logprobs), *_ = recorded()
    found = llm.choose(ids[:5], [ids[5:8], [1, 2]], ids[8:12])
    assert found.logprobs[0] == pytest.approx(logprobs[4:11].sum(), abs=5e-3)


@pytest.mark.parametrize("given", [{"mc_num": 4}, {"block_length": 4}, {"cfg_scale": 1.0}])
def test_settings_of_an_estimate_are_refused(given: dict[str, Any], llm: LLM):
    [name] = given
    with pytest.raises(RequestError, match=f"{name} is for .* nemotron_labs_diffusion model is scored as a"):
        llm.score([1], [2], **given)


def test_what_needs_masks_is_refused(llm: LLM):
    with pytest.raises(RequestError, match="the prompt is empty: a nemotron_labs_diffusion model needs a"):
        llm.score([], [2])
    with pytest.raises(RequestError, match="pseudo_likelihood is for models that see whole sequences"):
        llm.pseudo_likelihood([1, 2])
