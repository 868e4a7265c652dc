"""Dream's sampler over a batch: orders that are drawn, and the pooled quota."""

from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from scipy import stats

from jdllm.decoding.sampling import SamplingParams
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.outputs import RequestOutput
from jdllm.serving.updates import StepUpdate

MASK = 509
PROMPT = [3, 14, 15, 92]


def confidences(llm: LLM, alg: str, length: int) -> np.ndarray:
    """float64, of the positions that follow `PROMPT`, before the first step."""
    logits = llm.logits([[*PROMPT, *[MASK] * length]])[0].astype(np.float64)[len(PROMPT) - 1 : -1]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    if alg == "entropy":
        return (p * np.log(p + 1e-10)).sum(axis=1)
    second, best = np.sort(p, axis=1)[:, -2:].T
    return best - second if alg == "topk_margin" else best


def first_commits(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    """What the first step of each request committed, counted from the end of the prompt."""
    return [tuple(np.flatnonzero(np.asarray(o.history)[0, len(PROMPT) :] != MASK).tolist()) for o in outputs]


def set_probabilities(weights: np.ndarray, count: int) -> dict[tuple[int, ...], float]:
    """Of each set of `count` draws without replacement."""
    p = weights / weights.sum()
    out = {}
    for chosen in combinations(range(len(p)), count):
        out[chosen] = 0.0
        for order in permutations(chosen):
            left, probability = 1.0, 1.0
            for at in order:
                probability *= p[at] / left
                left -= p[at]
            out[chosen] += probability
    return out


@pytest.fixture(scope="module")
def wide_llm(dream_config: ModelConfig, dream_params: Params) -> LLM:
    """For many short requests."""
    return LLM(Transformer(dream_config, dream_params), max_num_batched_tokens=512)


class TestDrawnOrder:
    @pytest.mark.parametrize(("alg", "alg_temp"), [("topk_margin", 0.3), ("entropy", 2.0)])
    @pytest.mark.slow
    def test_is_a_draw_without_replacement_from_the_softmax(self, alg, alg_temp: float, wide_llm: LLM):
        length, draws = 5, 20 * (512 // 9)  # of 5 masks the first of two steps commits 2
        sampling = [
            SamplingParams(
                gen_length=length,
                steps=2,
                alg=alg,
                alg_temp=alg_temp,
                seed=seed,
                early_stop=False,
                return_history=True,
            )
            for seed in range(draws)
        ]
        outputs = wide_llm.generate(prompt_token_ids=[PROMPT] * draws, sampling=sampling)
        seen = first_commits(outputs)
        expected = set_probabilities(np.exp(confidences(wide_llm, alg, length) / alg_temp), 2)
        assert max(expected.values()) > 2 * min(expected.values())
        counts = [seen.count(chosen) for chosen in expected]
        assert sum(counts) == draws
        assert stats.chisquare(counts, draws * np.array(list(expected.values()))).pvalue > 1e-3

    @pytest.mark.slow
    def test_a_low_temperature_takes_the_surest(self, dream_llm: LLM):
        sampling = [
            SamplingParams(
                gen_length=5,
                steps=2,
                alg="maskgit_plus",
                alg_temp=t,
                seed=9,
                early_stop=False,
                return_history=True,
            )
            for t in (0.0, 1e-6)
        ]
        cold, almost = dream_llm.generate(prompt_token_ids=[PROMPT] * 2, sampling=sampling)
        np.testing.assert_array_equal(cold.history, almost.history)
        surest = np.argsort(-confidences(dream_llm, "maskgit_plus", 5))[:2]
        assert first_commits([cold]) == [tuple(sorted(surest.tolist()))]


class TestPooledQuota:
    steps, lengths = 4, (8, 11, 13)

    def run(self, llm: LLM, **options) -> tuple[np.ndarray, list[RequestOutput]]:
        """Tokens that each request committed in each step."""
        sampling = [
            SamplingParams(gen_length=n, steps=self.steps, alg="maskgit_plus", early_stop=False, **options)
            for n in self.lengths
        ]
        counts = np.zeros((self.steps, len(self.lengths)), int)

        def count(update: StepUpdate) -> None:
            counts[update.step, update.request] += update.committed.sum()

        outputs = llm.generate(prompt_token_ids=[PROMPT] * 3, sampling=sampling, on_step=count)
        return counts, outputs

    def official(self) -> np.ndarray:
        """Every row commits the share of the mean; int() of the mean itself in the last step."""
        times = np.linspace(1, 1e-3, self.steps + 1)
        left, counts = np.array(self.lengths), []
        for i in range(self.steps):
            share = 1 - times[i + 1] / times[i] if i < self.steps - 1 else 1
            counts.append([int(left.mean() * share)] * len(left))
            left = left - counts[-1]
            assert (left > 0).all() or i == self.steps - 1
        return np.array(counts)

    def test_averages_over_the_batch(self, dream_llm: LLM):
        counts, outputs = self.run(dream_llm, quota="batch")
        expected = self.official()
        np.testing.assert_array_equal(counts[:-1], expected[:-1])
        left = np.array(self.lengths) - expected[:-1].sum(axis=0)
        np.testing.assert_array_equal(counts[-1], np.minimum(expected[-1], left))
        for output, masks in zip(outputs, left - counts[-1], strict=True):
            assert output.token_ids.count(MASK) == masks
        assert outputs[-1].token_ids.count(MASK) > 0  # as the published code leaves them

    def test_otherwise_each_row_counts_its_own(self, dream_llm: LLM):
        counts, outputs = self.run(dream_llm)
        assert (counts.sum(axis=0) == self.lengths).all()
        assert not any(MASK in output.token_ids for output in outputs)
        alone = SamplingParams(
            gen_length=self.lengths[0], steps=self.steps, alg="maskgit_plus", early_stop=False
        )
        seen: list[int] = []
        dream_llm.generate(
            prompt_token_ids=[PROMPT], sampling=alone, on_step=lambda u: seen.append(int(u.committed.sum()))
        )
        assert counts[:, 0].tolist() == seen

    def test_only_requests_that_ask_for_it_are_averaged(self, dream_llm: LLM):
        options: list[dict[str, Any]] = [{"gen_length": 8, "quota": "batch"}, {"gen_length": 24}]
        sampling = [SamplingParams(steps=2, alg="maskgit_plus", early_stop=False, **o) for o in options]
        first: dict[int, int] = {}

        def note(update: StepUpdate) -> None:
            first.setdefault(update.request, int(update.committed.sum()))

        dream_llm.generate(prompt_token_ids=[PROMPT] * 2, sampling=sampling, on_step=note)
        assert first == {0: 3, 1: 11}  # int(8 * 0.4995), int(24 * 0.4995)
