"""Likelihoods against the recorded values of the official script, and the masks they average over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_softmax

from jdllm.compiling.executables import Executables
from jdllm.decoding.batch import HeadRows
from jdllm.decoding.head import gather_guided, source_rows
from jdllm.decoding.likelihood import Perturbation, perturb
from jdllm.execution.transformer import forward
from jdllm.layers import head_logits
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, head_weights
from jdllm.pallas.device import CPU
from jdllm.planning.account import make_account
from jdllm.scoring import MaskedPair, Scorer
from jdllm.serving.packing import lay_out

MASK = 510


def recorded(trajectories: dict[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray, Perturbation]:
    prompt, answer = trajectories[f"{name}.prompt"], trajectories[f"{name}.answer"]
    masked = trajectories[f"{name}.perturbed"][:, :, len(prompt) :] == MASK
    return prompt, answer, Perturbation(masked, trajectories[f"{name}.p_mask"][:, :, 0])


@pytest.mark.parametrize("limits", [(8192, 512), (70, 7)])
@pytest.mark.parametrize("name", ["loglik_cfg0.0", "loglik_cfg1.5"])
def test_equals_the_official_value(
    name: str,
    limits: tuple[int, int],
    params: Params,
    config: ModelConfig,
    executables: Executables,
    trajectories: dict[str, np.ndarray],
    cases: dict,
):
    rows, logits = limits
    account = make_account(config, "float32", None, device=CPU, max_num_batched_tokens=rows)
    scorer = Scorer(params, config, executables, account, lambda run: run(), logits)
    prompt, answer, masks = recorded(trajectories, name)
    [found] = scorer.likelihoods([MaskedPair(prompt, answer, masks)], cases[name]["cfg_scale"], MASK)
    value = found.log_likelihood
    assert value == pytest.approx(cases[name]["value"], rel=1e-4)


def test_guided_logits_equal_the_official_ones(
    params: Params, config: ModelConfig, goldens: dict[str, np.ndarray]
):
    ids, prompt = goldens["cfg.input_ids"], goldens["cfg.prompt_index"].astype(bool)
    batch, length = ids.shape
    tokens, rows, starts = lay_out([*ids, *np.where(prompt, MASK, ids)], config)
    row = (starts[:batch, None] + np.arange(length)).ravel()
    head = HeadRows(row, row + batch * length, np.repeat(np.arange(batch), length))
    positions = jnp.asarray(rows.positions)[row]

    @jax.jit
    def guided(params: Params) -> jax.Array:
        hidden = forward(params, config, tokens, rows)
        combined = gather_guided(
            params, config, hidden, source_rows(config, head, positions), jnp.full(len(row), 1.5)
        )
        return head_logits(combined, head_weights(params))

    actual = np.asarray(guided(params))
    expected = goldens["cfg.logits_scale1.5"].reshape(actual.shape)
    np.testing.assert_allclose(actual, expected, atol=2e-4, rtol=1e-4)


class TestPerturb:
    @given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 20), st.integers(0, 100))
    def test_every_row_masks_its_share(self, length: int, mc_num: int, batch: int, seed: int):
        masked, ratio = perturb(length, mc_num, batch, seed)
        assert masked.shape == (max(mc_num // batch, 1), batch, length)
        counts = masked.sum(axis=-1)
        assert (counts >= 1).all()
        np.testing.assert_allclose(ratio, counts / length, rtol=1e-12)

    @given(st.integers(0, 100), st.sampled_from([(24, 8), (24, 24), (12, 4), (7, 1)]))
    def test_counts_of_a_batch_are_evenly_spaced_around_the_circle(self, seed: int, sizes: tuple[int, int]):
        length, batch = sizes
        for counts in perturb(length, 5 * batch, batch, seed).masked.sum(axis=-1):
            gaps = np.diff(np.sort(counts), append=np.sort(counts)[0] + length)
            assert (gaps == length // batch).all()

    @given(st.integers(0, 100), st.integers(1, 30), st.integers(1, 30))
    def test_no_count_is_favoured_where_the_batch_does_not_divide(self, seed: int, length: int, batch: int):
        counts = perturb(length, batch, batch, seed).masked.sum(axis=-1).ravel()
        times = np.bincount(counts, minlength=length + 1)[1:]
        assert times.max() - times.min() <= (2 if length < batch else 1)

    def test_number_of_masks_is_uniform(self):
        masked = perturb(9, 9000, 1, seed=0).masked
        assert stats.chisquare(np.bincount(masked.sum(axis=-1).ravel(), minlength=10)[1:]).pvalue > 1e-3

    def test_masks_fall_anywhere_and_in_any_pairs(self):
        masked = perturb(6, 30_000, 3, seed=1).masked.reshape(-1, 6)
        assert stats.chisquare(masked.sum(axis=0)).pvalue > 1e-3
        pairs = masked[masked.sum(axis=1) == 2].astype(float)
        together = (pairs.T @ pairs)[np.triu_indices(6, 1)]
        assert stats.chisquare(together).pvalue > 1e-3

    def test_seed_decides(self):
        first, again, other = (perturb(20, 40, 4, seed).masked for seed in (3, 3, 4))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()


class TestScore:
    prompt, answer = [5, 17, 300], [44, 120, 7, 9, 260]

    def test_one_token_is_scored_exactly(self, llm: LLM):
        logits = llm.logits([[*self.prompt, MASK]])[0, -1].astype(np.float64)
        expected = log_softmax(logits)[44]
        assert llm.score(self.prompt, [44], mc_num=4, batch_size=2) == pytest.approx(expected, rel=1e-5)

    def test_two_tokens_average_over_their_masks(self, llm: LLM):
        both, first, second = (
            log_softmax(llm.logits([[*self.prompt, *tail]])[0].astype(np.float64), axis=-1)
            for tail in ((MASK, MASK), (MASK, 120), (44, MASK))
        )
        either = (first[-2, 44] + second[-1, 120]) / 2 / 0.5
        expected = (both[-2, 44] + both[-1, 120] + either) / 2
        estimate = llm.score(self.prompt, [44, 120], mc_num=512, batch_size=2)
        assert estimate == pytest.approx(expected, rel=0.02)

    def test_the_seed_alone_decides(self, llm: LLM):
        first, again, other = (
            llm.score(self.prompt, self.answer, mc_num=8, batch_size=4, seed=s) for s in (0, 0, 1)
        )
        assert np.isfinite(first)
        assert first == again
        assert first != other

    def test_guidance_and_an_empty_prompt(self, llm: LLM):
        plain, guided = (llm.score([], self.answer, mc_num=4, cfg_scale=s) for s in (0.0, 2.0))
        assert guided == pytest.approx(plain, rel=1e-5)  # without a prompt there is nothing to be guided by
        plain, guided = (llm.score(self.prompt, self.answer, mc_num=4, cfg_scale=s) for s in (0.0, 2.0))
        assert np.isfinite(guided)
        assert guided != pytest.approx(plain, rel=1e-3)
