"""Likelihoods of causal models, against logits recorded from transformers, and what is refused."""

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jdllm.checkpoints.loading import load_params
from jdllm.errors import NonFiniteError, RequestError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from tests.causal_texts import BOS, words, write_speaking
from tests.conftest import BUDGET, KV_POOL
from tests.evaluations import count_evaluations
from tests.helpers import Golden, slow

FAMILIES = ["llama", slow("llama31_rope"), slow("mistral"), "mistral_swa", slow("qwen2")]
PROMPT, ANSWER = [5, 17, 300], [44, 120, 7]


class Text(NamedTuple):
    """Recorded ids, and the f64 log-probabilities `[length, vocab]` of the token after each."""

    ids: list[int]
    following: np.ndarray


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(family: str) -> Iterator[LLM]:
    with LLM(Golden(family).directory, dtype="float32", max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as it:
        yield it


only_one = pytest.mark.parametrize("family", ["mistral_swa"], scope="module", indirect=True)


def recorded(family: str) -> list[Text]:
    tensors, texts = Golden(family).tensors(), []
    for case in ("fwd_b1", "fwd_batch", "pad_left"):
        ids, logits = tensors[f"{case}.input_ids"], tensors[f"{case}.logits"]
        kept = tensors.get(f"{case}.attention_mask", np.ones_like(ids)).astype(bool)
        for row, rows, live in zip(ids, logits, kept, strict=True):
            texts.append(Text(row[live].tolist(), log_softmax(rows[live].astype(np.float64), axis=-1)))
    return texts


def cuts(texts: list[Text]) -> Iterator[tuple[Text, int, int]]:
    """Each text with where its answer begins and ends: ragged, and more than an evaluation holds."""
    for text in texts:
        length = len(text.ids)
        for begin, end in ((1, length), (length // 2, length - 2), (length - 1, length), (2, 3)):
            yield text, begin, end


def pairs_of(family: str) -> list[tuple[list[int], list[int]]]:
    return [(text.ids[:begin], text.ids[begin:end]) for text, begin, end in cuts(recorded(family))]


def logprobs(llm: LLM, ids: list[int]) -> np.ndarray:
    """f64 log-probabilities `[length, vocab]` of the token after each."""
    return log_softmax(llm.logits([ids])[0].astype(np.float64), axis=-1)


def test_every_token_is_scored_as_recorded(family: str, llm: LLM):
    found = llm.token_logprobs(pairs_of(family), top_logprobs=5)
    for (text, begin, end), tokens in zip(cuts(recorded(family)), found, strict=True):
        assert len(tokens) == end - begin
        for place, token in enumerate(tokens, begin):
            row = text.following[place - 1]
            assert token.logprob == pytest.approx(row[text.ids[place]], abs=5e-4)
            assert token.best_logprob == pytest.approx(row.max(), abs=5e-4)
            assert row[token.best] == pytest.approx(row.max(), abs=5e-4)
            assert token.top_logprobs is not None
            assert list(token.top_logprobs.values()) == pytest.approx(np.sort(row)[::-1][:5], abs=5e-4)
            assert row[list(token.top_logprobs)] == pytest.approx(np.sort(row)[::-1][:5], abs=5e-4)


def test_likelihoods_are_sums_of_what_is_recorded(family: str, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    pairs = pairs_of(family)
    evaluations = count_evaluations(llm, monkeypatch)
    found = llm.likelihoods(pairs)
    assert len(evaluations) < len(pairs) / 2
    for (text, begin, end), one in zip(cuts(recorded(family)), found, strict=True):
        rows = text.following[begin - 1 : end - 1]
        expected = rows[np.arange(end - begin), text.ids[begin:end]].sum()
        assert one.log_likelihood == pytest.approx(expected, abs=5e-4 * (end - begin))
        assert (one.standard_error, one.mc_num) == (0.0, 1)
    for pair, one in itertools.islice(zip(pairs, found, strict=True), 4):
        assert llm.likelihood(*pair).log_likelihood == pytest.approx(one.log_likelihood, rel=1e-5)


@only_one
def test_a_score_is_the_sum_over_the_tokens(llm: LLM):
    [tokens] = llm.token_logprobs([(PROMPT, ANSWER)])
    assert llm.score(PROMPT, ANSWER) == pytest.approx(math.fsum(token.logprob for token in tokens), rel=1e-6)


def test_greedy_answers_are_the_best(family: str, llm: LLM):
    tensors = Golden(family).tensors()
    pairs = []
    for case in ("greedy_b1", "greedy_b2", "greedy_leftpad", "greedy_long"):
        length = tensors[f"{case}.prompt"].shape[1]
        masks = tensors[f"{case}.attention_mask"].astype(bool)
        for output, live in zip(tensors[f"{case}.output"], masks, strict=True):
            pairs.append((output[:length][live], output[length:]))
    for (_, answer), tokens in zip(pairs, llm.token_logprobs(pairs), strict=True):
        assert [token.best for token in tokens] == answer.tolist()
        assert all(token.logprob == token.best_logprob for token in tokens)


class TestChoose:
    OPTIONS = ([44, 120, 7], [44, 120, 9], [8], [44, 7], [44, 120, 7])

    @only_one
    @pytest.mark.parametrize("suffix", [[], [300, 4, 77]])
    def test_shares_are_those_of_option_and_suffix_together(self, suffix: list[int], llm: LLM):
        expected = []
        for option in self.OPTIONS:
            ids = [*PROMPT, *option, *suffix]
            rows = logprobs(llm, ids)[len(PROMPT) - 1 : -1]
            expected.append(rows[np.arange(len(rows)), ids[len(PROMPT) :]].sum())
        found = llm.choose(PROMPT, self.OPTIONS, suffix)
        assert found.logprobs == pytest.approx(expected, abs=1e-3)
        shares = np.exp(expected) / np.exp(expected).sum()
        assert found.probabilities == pytest.approx(shares.tolist(), rel=2e-3)
        assert found.best == np.argmax(expected)

    @only_one
    def test_without_a_suffix_options_are_answers(self, llm: LLM):
        found = llm.choose(PROMPT, self.OPTIONS)
        scores = [one.log_likelihood for one in llm.likelihoods((PROMPT, x) for x in self.OPTIONS)]
        assert found.logprobs == pytest.approx(scores, rel=1e-6)


REFUSED: dict[str, tuple[Callable[[LLM], Any], str]] = {
    "copies": (
        lambda llm: llm.score(PROMPT, ANSWER, mc_num=64),
        "mc_num is for models that denoise: a causal",
    ),
    "batches": (lambda llm: llm.likelihood(PROMPT, ANSWER, batch_size=8), "batch_size is for models that"),
    "guidance": (lambda llm: llm.score(PROMPT, ANSWER, cfg_scale=0.5), "cfg_scale .* classifier-free"),
    "seed": (lambda llm: llm.likelihoods([(PROMPT, ANSWER)], seed=1), "seed is for models that denoise"),
    "no prompt": (lambda llm: llm.score([], ANSWER), "prompt is empty: a causal .* such as the bos id 1"),
    "no prompt of several": (
        lambda llm: llm.token_logprobs([(PROMPT, ANSWER), ([], ANSWER)]),
        "prompt 1: the prompt is empty",
    ),
    "no answer": (lambda llm: llm.score(PROMPT, []), "the answer is empty"),
    "id outside": (lambda llm: llm.score(PROMPT, [512]), "512 .*outside the vocabulary"),
    "no prefix": (lambda llm: llm.choose([], [ANSWER]), "the prefix is empty: a causal"),
    "no options": (lambda llm: llm.choose(PROMPT, []), "no options"),
    "empty option": (lambda llm: llm.choose(PROMPT, [ANSWER, []]), "option 1 is empty"),
    "option outside": (lambda llm: llm.choose(PROMPT, [[512]]), "512 .*outside the vocabulary"),
    "suffix outside": (lambda llm: llm.choose(PROMPT, [[5]], [-1]), "-1 .*outside the vocabulary"),
    "tokens alone": (lambda llm: llm.pseudo_likelihood(PROMPT), "pseudo_likelihood is .* token_logprobs"),
    "masked tokens": (lambda llm: llm.conditionals([PROMPT], [0], [5]), "conditionals is for models that"),
}


@only_one
@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_runs(case: str, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    call, message = REFUSED[case]
    evaluations = count_evaluations(llm, monkeypatch)
    with pytest.raises(RequestError, match=message) as refused:
        call(llm)
    assert not evaluations
    assert "\n" not in str(refused.value)


@only_one
def test_no_pair(llm: LLM):
    assert llm.likelihoods([]) == llm.token_logprobs([]) == []


def test_values_that_are_no_numbers_are_named():
    directory = Golden("mistral_swa").directory
    config = config_from_hf(directory)
    params = load_params(directory, config, "float32")
    damaged = {**params, "final_norm": params["final_norm"].at[0].set(jnp.nan)}
    calls: dict[str, Callable[[LLM], Any]] = {
        "score": lambda llm: llm.score(PROMPT, ANSWER),
        "token_logprobs": lambda llm: llm.token_logprobs([(PROMPT, ANSWER)]),
        "choose": lambda llm: llm.choose(PROMPT, [ANSWER]),
    }
    with LLM(Transformer(config, damaged), max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
        for name, call in calls.items():
            with pytest.raises(NonFiniteError, match=f"{name}: the weights 'final_norm'"):
                call(llm)


class TestTexts:
    def load(self, directory: Path) -> LLM:
        return LLM(directory, dtype="float32", max_num_batched_tokens=BUDGET, kv_pool=KV_POOL)

    def test_what_begins_a_text_begins_the_prompt_alone(self, tmp_path: Path):
        with self.load(write_speaking(tmp_path, "mistral_swa", "added")) as llm:
            found = llm.likelihoods([(words(*PROMPT), words(*ANSWER)), ("", words(*ANSWER)), ("", ANSWER)])
            expected = llm.likelihoods([([BOS, *PROMPT], ANSWER), ([BOS], ANSWER), ([BOS], ANSWER)])
        for one, other in zip(found, expected, strict=True):
            assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-6)

    def test_where_nothing_begins_a_text_an_empty_one_is_no_prompt(self, tmp_path: Path):
        with self.load(write_speaking(tmp_path, "mistral_swa", "known")) as llm:
            assert llm.score(words(5), words(6)) == pytest.approx(llm.score([5], [6]), rel=1e-6)
            with pytest.raises(RequestError, match="the prompt is empty"):
                llm.score("", words(6))
