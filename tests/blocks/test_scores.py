"""Likelihoods by blocks, against evaluations of whole sequences, one for each masked copy of each block."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.decoding.likelihood import perturb
from jdllm.errors import NonFiniteError, RequestError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.scoring import Likelihood
from tests.blocks.conftest import Scored, scored_of
from tests.blocks.recorded import FAST_DLLM_V2, LLADA2, SDAR
from tests.conftest import KV_POOL
from tests.evaluations import count_evaluations
from tests.helpers import slow

GOLDENS = {"sdar": SDAR, "llada2": LLADA2, "fast_dllm_v2": FAST_DLLM_V2}


@pytest.fixture(params=["sdar", slow("llada2"), "fast_dllm_v2"])
def scored(request: pytest.FixtureRequest) -> Scored:
    return scored_of(GOLDENS[request.param])


def estimated(
    scored: Scored, prompt: list[int], answer: list[int], length: int, mc_num: int, batch: int, seed: int
) -> np.ndarray:
    """Estimates `[iterations, batch]`, an evaluation for every draw of every block."""
    tokens, mask_id = np.array([*prompt, *answer], np.int32), scored.mask_id
    total = np.zeros((mc_num // batch, batch))
    for number, start in enumerate(range(len(prompt) // length * length, len(tokens), length)):
        end = start + length
        own = np.arange(max(start, len(prompt)), min(end, len(tokens)))
        masks, ratio = perturb(len(own), mc_num, batch, [seed, number])
        for draw in np.ndindex(*ratio.shape):
            at = own[masks[draw]]
            seen = np.full(end, mask_id, np.int32)
            seen[: len(tokens)] = tokens[:end]
            seen[at] = mask_id
            rows = scored.logprobs(seen, length)
            total[draw] += rows[at, tokens[at]].sum() / ratio[draw]
    return total


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, count]).integers(1, 300, count).tolist()


def close(expected: Any) -> Any:
    """Equal up to the rounding of f32."""
    return pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "answer", "length"),
    [(5, 9, 4), (8, 6, 8), (3, 2, 8), (1, 16, 8), (16, 3, 2)],
    ids=["inside a block", "at the end of a block", "one block", "three blocks", "short blocks"],
)
def test_a_likelihood_is_the_sum_over_the_blocks(scored: Scored, prompt: int, answer: int, length: int):
    before, after = ids(prompt), ids(answer, 1)
    options: dict[str, Any] = {"mc_num": 12, "batch_size": 4, "seed": 3}
    found = scored.llm.likelihood(before, after, block_length=length, **options)
    means = estimated(scored, before, after, length, 12, 4, 3).mean(axis=1)
    assert found.log_likelihood == close(means.mean())
    assert found.standard_error == pytest.approx(means.std(ddof=1) / math.sqrt(3), rel=1e-3)
    assert found.mc_num == 12
    assert scored.llm.score(before, after, block_length=length, **options) == found.log_likelihood


def test_blocks_are_as_long_as_those_of_the_model():
    scored = scored_of(SDAR)
    expected = estimated(scored, ids(6), ids(7, 1), 4, 8, 8, 0)
    found = scored.llm.likelihood(ids(6), ids(7, 1), mc_num=8, batch_size=8)
    assert found.log_likelihood == close(expected.mean())
    assert found.standard_error is None


def test_an_answer_without_a_prompt():
    scored = scored_of(SDAR)
    expected = estimated(scored, [], ids(6), 4, 4, 2, 0).mean()
    assert scored.llm.score([], ids(6), mc_num=4, batch_size=2) == close(expected)


def test_at_block_length_1_each_token_is_scored_given_those_before_it(
    scored: Scored, monkeypatch: pytest.MonkeyPatch
):
    before, after, expected = ids(7), ids(12, 1), 0.0
    for place, token in enumerate(after, len(before)):
        seen = np.array([*(before + after)[:place], scored.mask_id], np.int32)
        expected += scored.logprobs(seen, 1)[place, token]
    evaluations = count_evaluations(scored.llm, monkeypatch)
    found = scored.llm.likelihood(before, after, block_length=1)
    assert found == Likelihood(close(expected), 0.0, 1)
    assert len(evaluations) == 1


def test_estimates_are_about_the_mean_over_all_masks():
    """A block with two tokens of the answer has three masks, of which one has both tokens."""
    scored = scored_of(SDAR)
    tokens, mask_id = np.array(ids(8), np.int32), scored.mask_id
    found = {}
    for masked in ((6, 7), (6,), (7,)):
        seen = tokens.copy()
        seen[list(masked)] = mask_id
        found[masked] = scored.logprobs(seen, 4)[list(masked), tokens[list(masked)]].sum()
    expected = (found[6, 7] + (found[6,] + found[7,]) / 2 / 0.5) / 2
    estimate = scored.llm.likelihood(tokens[:6], tokens[6:], mc_num=512, batch_size=2)
    assert estimate.standard_error
    assert abs(estimate.log_likelihood - expected) < 3 * estimate.standard_error


@pytest.mark.parametrize("length", [1, 4])
def test_a_long_text_is_cut_into_evaluations(length: int, monkeypatch: pytest.MonkeyPatch):
    """More rows than an evaluation has: of the copies, and of the blocks before a copy alone."""
    scored = scored_of(SDAR)
    for prompt, answer in ((90, 60), (300, 13)):
        before, after = ids(prompt), ids(answer, 1)
        expected = estimated(scored, before, after, length, 2, 2, 0).mean()
        with monkeypatch.context() as patch:
            evaluations = count_evaluations(scored.llm, patch)
            found = scored.llm.score(before, after, mc_num=2, batch_size=2, block_length=length)
        assert found == close(expected)
        assert 1 <= len(evaluations) <= 3


def test_once_warmed_up_no_text_of_an_evaluation_compiles_anything():
    llm = scored_of(SDAR).llm
    compiled = llm.executables.compiled
    for prompt, answer, length in ((0, 1, None), (30, 5, 4), (3, 40, 1), (100, 20, 32)):
        llm.score(ids(prompt), ids(answer, 1), block_length=length, mc_num=2)
    assert llm.executables.compiled == compiled


def test_like_copies_are_evaluated_once_and_share_the_blocks_before_them(monkeypatch: pytest.MonkeyPatch):
    llm = scored_of(SDAR).llm
    evaluations = count_evaluations(llm, monkeypatch)
    llm.score(ids(100), ids(8, 1), mc_num=4096)  # 15 masks of each of two blocks
    assert len(evaluations) == 1


def test_pairs_share_evaluations_and_keep_their_numbers(monkeypatch: pytest.MonkeyPatch):
    llm = scored_of(SDAR).llm
    pairs = [(ids(n), ids(m, 1)) for n, m in ((5, 9), (0, 3), (2, 1), (17, 4), (40, 40))]
    options: dict[str, Any] = {"mc_num": 8, "batch_size": 4, "seed": 1}
    alone = [llm.likelihood(*pair, **options) for pair in pairs]
    evaluations = count_evaluations(llm, monkeypatch)
    together = llm.likelihoods(pairs, **options)
    assert len(evaluations) < len(pairs)
    assert together[2] == Likelihood(close(alone[2].log_likelihood), 0.0, 1)
    for one, other in zip(alone, together, strict=True):
        assert other.log_likelihood == close(one.log_likelihood)
        assert other.standard_error == pytest.approx(one.standard_error, rel=1e-3, abs=1e-5)
    assert llm.likelihoods([]) == []


REFUSED: dict[str, tuple[Callable[[LLM], Any], str]] = {
    "guidance": (lambda llm: llm.score([1], [2], cfg_scale=1.0), "leave it at 0 for a block model"),
    "block": (
        lambda llm: llm.score([1], [2], block_length=24),
        "block_length is 24, expected a divisor of 64",
    ),
    "no block": (lambda llm: llm.score([1], [2], block_length=0), "block_length is 0, expected a divisor of"),
    "copies": (lambda llm: llm.score([1], [2], mc_num=0), "mc_num is 0, expected a positive integer"),
    "seed": (lambda llm: llm.score([1], [2], seed=-1), "seed is -1"),
    "answer": (lambda llm: llm.likelihoods([([1], [2]), ([1], [])]), "prompt 1: the answer is empty"),
    "tokens": (lambda llm: llm.token_logprobs([([1], [2])]), "causal models: score has the likelihood of a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_runs(case: str, monkeypatch: pytest.MonkeyPatch):
    (call, message), llm = REFUSED[case], scored_of(SDAR).llm
    evaluations = count_evaluations(llm, monkeypatch)
    with pytest.raises(RequestError, match=message):
        call(llm)
    assert not evaluations


def test_shifted_logits_need_a_prompt():
    with pytest.raises(RequestError, match="the prompt is empty: a fast_dllm_v2 model needs a token before"):
        scored_of(FAST_DLLM_V2).llm.score([], [2])


def test_values_that_are_no_numbers_are_named(params: Params, config: ModelConfig):
    damaged = {**params, "final_norm": params["final_norm"].at[0].set(jnp.nan)}
    with (
        LLM(Transformer(config, damaged), max_num_batched_tokens=128, kv_pool=KV_POOL) as llm,
        pytest.raises(NonFiniteError, match="score: the weights 'final_norm'"),
    ):
        llm.score([1, 2], [3])
