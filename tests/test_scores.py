"""Likelihoods with their errors, conditional probabilities and options, against brute force in float64."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jdllm.compiling.executables import Executables
from jdllm.decoding.likelihood import perturb
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import NonFiniteError, RequestError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.planning.ladder import make_score_ladder
from jdllm.scoring import MaskedPair, Scorer
from jdllm.serving.spec import mask_id_of
from tests.conftest import BUDGET, KV_POOL
from tests.evaluations import count_evaluations

PROMPT, ANSWER = [5, 17, 300], [44, 120, 7, 9, 260]
PAIRS = [(PROMPT, ANSWER), ([], [8]), ([1, 2, 3, 4, 5, 6, 7], [9, 10]), ([33], [3, 2, 1])]
SHORT = SamplingParams(gen_length=8, steps=2)


both_families = pytest.mark.parametrize("family", ["llm", "dream_llm"])


@pytest.fixture
def model(family: str, request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(family)


def logprobs(llm: LLM, ids: Sequence[int]) -> np.ndarray:
    """f64 log-probabilities `[length, vocab]` of the token at each position."""
    logits = llm.logits([list(ids)])[0].astype(np.float64)
    if llm.config.logits_shift:  # row j predicts token j + 1, and the first row its own too
        logits = np.concatenate([logits[:1], logits[:-1]])
    return log_softmax(logits, axis=-1)


def close(expected: Any) -> Any:
    """Equal up to the rounding of f32."""
    return pytest.approx(expected, rel=1e-4, abs=1e-5)


def masked(llm: LLM, ids: Sequence[int], *positions: int) -> list[int]:
    assert llm.config.mask_id is not None
    return [llm.config.mask_id if i in positions else token for i, token in enumerate(ids)]


class TestLikelihood:
    @both_families
    def test_mean_and_error_are_those_of_the_batches(self, model: LLM):
        found = model.likelihood(PROMPT, ANSWER, mc_num=12, batch_size=4, seed=3)
        masks, ratio = perturb(len(ANSWER), 12, 4, 3)
        estimates = np.zeros(ratio.shape)
        for place in np.ndindex(*ratio.shape):
            at = len(PROMPT) + np.flatnonzero(masks[place])
            rows = logprobs(model, masked(model, PROMPT + ANSWER, *at.tolist()))
            estimates[place] = rows[at, np.array(PROMPT + ANSWER)[at]].sum() / ratio[place]
        batches = estimates.mean(axis=1).tolist()
        mean = sum(batches) / 3
        variance = sum((batch - mean) ** 2 for batch in batches) / 2
        assert found.log_likelihood == close(mean)
        assert found.standard_error == pytest.approx(math.sqrt(variance / 3), rel=1e-3)
        assert found.mc_num == 12
        assert model.score(PROMPT, ANSWER, mc_num=12, batch_size=4, seed=3) == found.log_likelihood

    def test_the_error_is_that_of_repeated_estimates(self, llm: LLM):
        runs = [llm.likelihood(PROMPT, ANSWER[:2], mc_num=16, batch_size=2, seed=s) for s in range(40)]
        spread = np.std([run.log_likelihood for run in runs], ddof=1)
        typical = np.sqrt(np.mean([(run.standard_error or 0) ** 2 for run in runs]))
        assert 0.6 < spread / typical < 1.6

    def test_one_batch_has_no_error(self, llm: LLM):
        found = llm.likelihood(PROMPT, ANSWER, mc_num=7, batch_size=4)
        assert (found.standard_error, found.mc_num) == (None, 4)

    @both_families
    @pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
    def test_pairs_share_evaluations_and_keep_their_numbers(
        self, cfg_scale: float, model: LLM, monkeypatch: pytest.MonkeyPatch
    ):
        options = {"mc_num": 8, "batch_size": 4, "cfg_scale": cfg_scale, "seed": 1}
        alone = [model.likelihood(*pair, **options) for pair in PAIRS]
        evaluations = count_evaluations(model, monkeypatch)
        together = model.likelihoods(PAIRS, **options)
        rows = 8 * sum(len(prompt) + len(answer) for prompt, answer in PAIRS) * (2 if cfg_scale else 1)
        # Each is full but for less than the longest sequence.
        longest = 9 * (2 if cfg_scale else 1)
        assert len(evaluations) <= math.ceil(rows / (model.account.rows - longest + 1))
        for one, other in zip(alone, together, strict=True):
            assert other.log_likelihood == close(one.log_likelihood)
            assert other.standard_error == pytest.approx(one.standard_error, rel=1e-3, abs=1e-5)

    def test_no_pair(self, llm: LLM):
        assert llm.likelihoods([]) == []

    @pytest.mark.parametrize(
        ("pairs", "message"),
        [
            ([(PROMPT, ANSWER), (PROMPT, [])], "prompt 1: the answer is empty"),
            ([(PROMPT, [600])], "600 .*outside the vocabulary"),
            ([(PROMPT,)], r"expected \(prompt, answer\)"),
            (["ab"], r"expected \(prompt, answer\)"),
            ([("text", [1])], "tokenizer.json"),
        ],
    )
    def test_refused_before_anything_runs(
        self, pairs: list, message: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ):
        evaluations = count_evaluations(llm, monkeypatch)
        with pytest.raises(RequestError, match=message):
            llm.likelihoods(pairs)
        assert not evaluations


class TestConditionals:
    @both_families
    def test_equal_the_softmax_of_the_logits(self, model: LLM, monkeypatch: pytest.MonkeyPatch):
        rng = np.random.default_rng(0)
        sequences, positions = [], []
        for length in (1, 9, 20, 30, 4, 70, 13):
            places = rng.choice(length, size=(length + 2) // 3, replace=False).tolist()
            sequences.append(masked(model, rng.integers(500, size=length).tolist(), *places))
            positions.append(places[0])
        positions[1] = 0
        sequences[1] = masked(model, sequences[1], 0)
        targets = rng.integers(500, size=len(sequences)).tolist()
        evaluations = count_evaluations(model, monkeypatch)
        found = model.conditionals(sequences, positions, targets)
        assert len(evaluations) < len(sequences)
        for ids, position, target, one in zip(sequences, positions, targets, found, strict=True):
            row = logprobs(model, ids)[position]
            assert one.logprob == close(row[target])
            assert one.best == row.argmax()
            assert one.best_logprob == close(row.max())

    def test_equals_go_to_the_lowest_id(self, params: Params, config: ModelConfig):
        flat = {**params, "head": jnp.zeros_like(params["head"])}
        with LLM(Transformer(config, flat), max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
            (found,) = llm.conditionals([masked(llm, PROMPT, 1)], [1], [77])
        assert found.best == 0
        assert found.logprob == found.best_logprob == pytest.approx(-math.log(config.vocab_size), rel=1e-6)

    @both_families
    def test_every_token_alone(self, model: LLM):
        found = model.pseudo_likelihood(PROMPT + ANSWER, top_logprobs=3)
        assert len(found) == len(PROMPT + ANSWER)
        for i, one in enumerate(found):
            row = logprobs(model, masked(model, PROMPT + ANSWER, i))[i]
            assert one.logprob == close(row[(PROMPT + ANSWER)[i]])
            assert (one.best, one.best_logprob) == (row.argmax(), close(row.max()))
            assert one.top_logprobs is not None
            assert list(one.top_logprobs) == np.argsort(-row, kind="stable")[:3].tolist()
            assert list(one.top_logprobs.values()) == [close(p) for p in np.sort(row)[::-1][:3]]
        with pytest.raises(RequestError, match="top_logprobs is 21, expected an integer from 0 to 20"):
            model.pseudo_likelihood(PROMPT, top_logprobs=21)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([PROMPT], [0, 1], [5]), "1 sequences, 2 positions and 1 targets"),
            (([PROMPT], [0], [5]), "position 0 is none of the masks"),
            (([[510, 1], PROMPT], [0, 3], [5, 5]), "prompt 1: position 3 is none of the masks"),
            (([[510]], [-1], [5]), "position -1 is none of the masks"),
            (([[510]], [0.0], [5]), "position is 0.0, expected an integer"),
            (([[510]], [0], [512]), "512 .*outside the vocabulary"),
            (([[510, 600]], [0], [5]), "600 .*outside the vocabulary"),
            (([[]], [0], [5]), "empty"),
        ],
    )
    def test_refused(self, arguments: tuple, message: str, llm: LLM):
        with pytest.raises(RequestError, match=message):
            llm.conditionals(*arguments)

    @pytest.mark.parametrize(
        ("ids", "message"), [([], "empty"), ([1, 510], "mask id 510 at position 1"), ([-1], "outside")]
    )
    def test_sequences_that_cannot_be_scored(self, ids: list[int], message: str, llm: LLM):
        with pytest.raises(RequestError, match=message):
            llm.pseudo_likelihood(ids)


class TestChoose:
    OPTIONS = ([44, 120, 7], [44, 120, 9], [8], [44, 7], [9], [44, 120, 7])

    @both_families
    @pytest.mark.parametrize("around", [([5, 17], [300, 4]), ([], [6]), ([6], [])])
    def test_equals_the_chain_rule(self, around: tuple[list[int], list[int]], model: LLM):
        assert model.config.mask_id is not None
        mask = model.config.mask_id
        prefix, suffix = ([*side, mask] if side else [] for side in around)
        expected = []
        for option in self.OPTIONS:
            total = 0.0
            for j, token in enumerate(option):
                ids = [*prefix, *option[:j], *[mask] * (len(option) - j), *suffix]
                total += logprobs(model, ids)[len(prefix) + j, token]
            expected.append(total)
        found = model.choose(prefix, self.OPTIONS, suffix)
        assert found.logprobs == close(expected)
        shares = np.exp(expected) / np.exp(expected).sum()
        assert found.probabilities == pytest.approx(shares.tolist(), rel=1e-3)
        assert found.best == np.argmax(expected)

    def test_of_equals_the_first(self, llm: LLM):
        found = llm.choose([5], [[8], [9], [9], [8]])
        assert found.logprobs[0] == found.logprobs[3]
        assert found.best == found.logprobs.index(max(found.logprobs)) < 2

    def test_far_from_likely_options_have_probabilities_too(self, params: Params, config: ModelConfig):
        sharp = {**params, "head": params["head"] * 500}
        with LLM(Transformer(config, sharp), max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
            found = llm.choose([5], [[8] * 4, [8] * 4])
        assert found.logprobs[0] < -745  # beyond exp in f64
        assert found.probabilities == pytest.approx([0.5, 0.5])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([1], []), "no options"),
            (([1], [[2], []]), "option 1 is empty"),
            (([1], [[2], [3, 510]]), "option 1 has the mask id 510 at position 1"),
            (([1], [[512]]), "512 .*outside the vocabulary"),
            (([-1], [[2]]), "-1 .*outside the vocabulary"),
            (([1], [[2]], [999]), "999 .*outside the vocabulary"),
        ],
    )
    def test_refused(self, arguments: tuple, message: str, llm: LLM):
        with pytest.raises(RequestError, match=message):
            llm.choose(*arguments)


CALLS: dict[str, Callable[[LLM], Any]] = {
    "score": lambda llm: llm.likelihoods(PAIRS, mc_num=2, batch_size=2),
    "conditionals": lambda llm: llm.conditionals([[510, 1]], [0], [5]),
    "pseudo_likelihood": lambda llm: llm.pseudo_likelihood(PROMPT),
    "choose": lambda llm: llm.choose([5], [[8], [9]]),
}


def test_values_that_are_no_numbers_are_named(params: Params, config: ModelConfig):
    damaged = {**params, "final_norm": params["final_norm"].at[0].set(jnp.nan)}
    with LLM(Transformer(config, damaged), max_num_batched_tokens=BUDGET, kv_pool=KV_POOL) as llm:
        for name, call in CALLS.items():
            with pytest.raises(NonFiniteError, match=f"{name}: the weights 'final_norm'"):
                call(llm)


@pytest.mark.slow
def test_others_are_served_between_evaluations(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    scorer, answers = llm.scorer, []
    plain = scorer.run

    def run(function: Callable[[], Any]) -> Any:
        answers.extend(llm.generate(prompt_token_ids=[PROMPT], sampling=SHORT))
        return plain(function)

    expected = llm.pseudo_likelihood(PROMPT * 10)
    monkeypatch.setattr(scorer, "run", run)
    assert llm.pseudo_likelihood(PROMPT * 10) == expected
    assert len(answers) == 15  # two sequences of 30 rows in 64


def test_once_warmed_up_no_text_compiles_anything_and_all_has_the_same_scores(
    llm: LLM, params: Params, config: ModelConfig
):
    executables = Executables("cpu")
    scorer = Scorer(params, config, executables, llm.account, lambda run: run(), 512)
    scorer.warm()
    compiled = executables.compiled
    assert compiled == len(make_score_ladder(llm.account.rows))
    rng, mask_id = np.random.default_rng(0), mask_id_of(config)
    for length, options in [(1, {}), (5, {"cfg_scale": 0.7}), (40, {}), (11, {"mc_num": 16})]:
        prompt, answer = rng.integers(1, 200, 7), rng.integers(1, 200, length)
        given = {"mc_num": 3, "batch_size": 3, "cfg_scale": 0.0, **options}
        masks = perturb(length, int(given["mc_num"]), 3, 0)
        [found] = scorer.likelihoods([MaskedPair(prompt, answer, masks)], given["cfg_scale"], mask_id)
        assert found.log_likelihood == close(llm.score(prompt, answer, **given))
    assert executables.compiled == compiled
