"""Likelihoods of block models as lm-eval asks for them; no lm-eval needed."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.harness.likelihoods import Exact, Likelihoods, likelihoods_of
from jdllm.harness.translation import Pair, read_model_arguments
from jdllm.llm import LLM
from tests.causal_texts import EOS, words, write_speaking
from tests.conftest import BUDGET, KV_POOL

CONTEXT, ANSWER = [5, 17, 300], [44, 120, 7]


class Speaking(NamedTuple):
    """A block model that reads words."""

    llm: LLM
    tokenizer: Tokenizer

    def likelihoods(self, max_length: int = 64, **given: Any) -> Likelihoods:
        asked = read_model_arguments({"mc_num": 4, "mc_batch_size": 2, "seed": 1, **given})
        return likelihoods_of(self.llm, self.tokenizer, asked, max_length)


def speaking(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaking]:
    directory = write_speaking(tmp_path_factory.mktemp(family), family, "none")
    sizes = {"max_num_batched_tokens": BUDGET, "kv_pool": KV_POOL}
    with LLM(directory, dtype="float32", hf_overrides={"mask_token_id": 317}, **sizes) as llm:
        assert llm.tokenizer is not None
        yield Speaking(llm, llm.tokenizer)


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaking]:
    yield from speaking("sdar", tmp_path_factory)


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaking]:
    yield from speaking("fast_dllm_v2", tmp_path_factory)


def test_scores_are_the_library_s_and_know_the_greedy_answer(sdar: Speaking):
    sampling = SamplingParams(gen_length=3, block_length=2, early_stop=False)
    [output] = sdar.llm.generate(prompt_token_ids=[CONTEXT], sampling=sampling)
    pairs = [Pair(CONTEXT, output.token_ids), Pair(CONTEXT, ANSWER), Pair([], ANSWER)]
    expected = sdar.llm.likelihoods(pairs, mc_num=4, batch_size=2, seed=1, block_length=2)
    found = sdar.likelihoods(block_length=2).with_greedy(pairs, progress=False)
    assert [score for score, _ in found] == pytest.approx([one.log_likelihood for one in expected], rel=1e-5)
    assert [greedy for _, greedy in found] == [True, False, False]
    unchecked = sdar.likelihoods(block_length=2, is_check_greedy=False).with_greedy(pairs, progress=False)
    assert unchecked == [(score, False) for score, _ in found]


def test_a_text_needs_nothing_before_it(sdar: Speaking):
    likelihoods = sdar.likelihoods(max_length=4)
    assert likelihoods.pair("", words(*ANSWER)) == ([], ANSWER)
    assert likelihoods.fitted(Pair([1, 2, 3], [4, 5, 6, 7])) == ([], [4, 5, 6, 7])
    assert likelihoods.windows(words(*range(20, 26))) == [([], [20, 21, 22, 23]), ([22, 23], [24, 25])]


def test_shifted_logits_need_a_token_before_a_text(shifted: Speaking):
    likelihoods = shifted.likelihoods(max_length=4)
    assert likelihoods.pair("", words(*ANSWER)) == ([EOS], ANSWER)
    assert likelihoods.pair(words(5), words(6)) == ([5], [6])
    assert likelihoods.fitted(Pair([1, 2, 3], [4, 5, 6, 7])) == ([3], [4, 5, 6, 7])
    windows = likelihoods.windows(words(*range(20, 25)))
    assert windows == [([EOS], [20, 21, 22]), ([21, 22], [23, 24])]
    assert len(likelihoods.log_likelihoods(windows, progress=False)) == 2


def test_a_model_with_a_causal_context_is_scored_exactly(tmp_path_factory: pytest.TempPathFactory):
    [nemotron] = speaking("nemotron_labs_diffusion", tmp_path_factory)
    asked = read_model_arguments({})
    assert isinstance(likelihoods_of(nemotron.llm, nemotron.tokenizer, asked, 64), Exact)
