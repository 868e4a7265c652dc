"""Likelihoods of a causal model as lm-eval asks for them; no lm-eval needed."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.special import log_softmax

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.errors import ConfigError
from jdllm.harness.likelihoods import Exact, Likelihoods, likelihoods_of
from jdllm.harness.translation import Pair, read_model_arguments
from jdllm.llm import LLM
from tests.causal_texts import BOS, EOS, Begins, words, write_speaking
from tests.conftest import BUDGET, KV_POOL

CONTEXT, ANSWER = [5, 17, 300], [44, 120]
LENGTH = 4


class Speaking(NamedTuple):
    """A causal model, and the ids that it has before a text and before one without a context."""

    llm: LLM
    tokenizer: Tokenizer
    begins: list[int]
    first: int

    def likelihoods(self, max_length: int = 64, **given: Any) -> Likelihoods:
        return likelihoods_of(self.llm, self.tokenizer, read_model_arguments(given), max_length)


@pytest.fixture(scope="module", params=["added", "known", "none"])
def speaking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaking]:
    begins: Begins = request.param
    directory = write_speaking(tmp_path_factory.mktemp("speaking"), "mistral_swa", begins)
    with LLM(directory, dtype="float32", max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
        assert llm.tokenizer is not None
        yield Speaking(llm, llm.tokenizer, [BOS] * (begins == "added"), EOS if begins == "none" else BOS)


def logprobs(llm: LLM, ids: list[int]) -> np.ndarray:
    """f64 log-probabilities `[length, vocab]` of the token after each."""
    return log_softmax(llm.logits([ids])[0].astype(np.float64), axis=-1)


def expected(llm: LLM, prompt: list[int], answer: list[int]) -> float:
    rows = logprobs(llm, [*prompt, *answer])[len(prompt) - 1 : -1]
    return float(rows[np.arange(len(answer)), answer].sum())


def test_pairs_are_ids_of_one_text(speaking: Speaking):
    exact = speaking.likelihoods()
    begun = [*speaking.begins, *CONTEXT]
    assert exact.pair(words(*CONTEXT), f" {words(*ANSWER)}") == (begun, ANSWER)
    assert exact.pair(f"{words(*CONTEXT)} ", words(*ANSWER)) == (begun, ANSWER)


def test_an_answer_without_a_context_is_behind_what_begins_texts(speaking: Speaking):
    exact = speaking.likelihoods()
    special = speaking.tokenizer.token(speaking.first)
    assert exact.pair("", words(*ANSWER)) == exact.pair(" ", words(*ANSWER)) == ([speaking.first], ANSWER)
    assert exact.pair("", f"{special} {words(*ANSWER)}") == ([speaking.first], ANSWER)


def test_the_last_token_of_a_pair_needs_no_position(speaking: Speaking):
    exact = speaking.likelihoods(max_length=4)
    assert exact.fitted(Pair([1, 2, 3], [4, 5])) == ([1, 2, 3], [4, 5])
    assert exact.fitted(Pair([1, 2, 3], [4, 5, 6])) == ([2, 3], [4, 5, 6])
    assert exact.fitted(Pair([1, 2, 3], [4, 5, 6, 7, 8])) == ([3], [4, 5, 6, 7, 8])


def test_scores_are_exact_and_know_the_greedy_answer(speaking: Speaking):
    best = [*CONTEXT]
    for _ in range(3):
        best.append(int(logprobs(speaking.llm, best)[-1].argmax()))
    greedy = best[len(CONTEXT) :]
    pairs = [
        Pair(CONTEXT, greedy),
        Pair(CONTEXT, [*greedy[:2], (greedy[2] + 1) % 512]),
        Pair(CONTEXT, ANSWER),
        Pair([BOS], [6]),
    ]
    scores = [expected(speaking.llm, *pair) for pair in pairs]
    found = speaking.likelihoods().with_greedy(pairs, progress=False)
    assert [score for score, _ in found] == pytest.approx(scores, abs=1e-3)
    assert [is_greedy for _, is_greedy in found[:3]] == [True, False, False]
    assert speaking.likelihoods().log_likelihoods(pairs, progress=False) == pytest.approx(scores, abs=1e-3)
    unchecked = speaking.likelihoods(is_check_greedy=False).with_greedy(pairs, progress=False)
    assert unchecked == [(score, False) for score, _ in found]


@pytest.mark.parametrize("count", [1, LENGTH, LENGTH + 1, 2 * LENGTH, 11])
def test_a_text_is_the_sum_over_its_windows(speaking: Speaking, count: int):
    ids = list(range(20, 20 + count))
    exact = speaking.likelihoods(max_length=LENGTH)
    found = math.fsum(exact.log_likelihoods(exact.windows(words(*ids)), progress=False))
    whole, total = [speaking.first, *ids], 0.0
    for stop in range(1, count + 1):
        # The window that scores the token at `stop` is full, or it is the last one, or the text is short.
        end = min(math.ceil(stop / LENGTH) * LENGTH, count)
        total += expected(speaking.llm, whole[max(end - LENGTH, 0) : stop], whole[stop : stop + 1])
    assert found == pytest.approx(total, abs=1e-3)


def test_a_whole_text_is_the_sum_over_its_own_tokens(speaking: Speaking):
    exact = speaking.likelihoods()
    [pair] = exact.windows(words(*CONTEXT, *ANSWER))
    assert pair == ([speaking.first], CONTEXT + ANSWER)
    assert exact.windows("") == []


@pytest.mark.parametrize("given", [{"mc_num": 32}, {"mc_batch_size": 8}])
def test_arguments_of_an_estimate_are_refused(speaking: Speaking, given: dict[str, int]):
    with pytest.raises(ConfigError, match=f"model_args has '{next(iter(given))}', which is for models that"):
        speaking.likelihoods(**given)


def test_a_causal_model_is_scored_exactly(speaking: Speaking):
    assert isinstance(speaking.likelihoods(), Exact)
