"""Adaptive parallel decoding against a slow copy, and what it may not depend on."""

import dataclasses
import functools
from itertools import batched
from typing import Any

import numpy as np
import pytest

from jdllm.chunks import ChunkConfig
from jdllm.decoding.adaptive import denoise_adaptive
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.models.weights import abstract_params, param_bytes
from jdllm.planning.budget import MemoryBudgetError
from jdllm.serving.adaptive.packing import pack_adaptive
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.adaptive.verifier_keys import VerifierKeys
from jdllm.serving.updates import StepUpdate
from tests.decoding import slow_adaptive
from tests.decoding.adaptive_models import (
    CAUSAL,
    DREAM,
    LLADA,
    MASK,
    PROMPTS,
    VOCAB,
    Pair,
    pair_of,
    tiny,
    wordwise,
)
from tests.decoding.slow_adaptive import Iteration, Models
from tests.engines import entry_of, generation_request
from tests.pallas.jaxprs import largest_intermediate

pytestmark = pytest.mark.usefixtures("shared_executables")

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def llada() -> Pair:
    return pair_of(LLADA)


@pytest.fixture(scope="module")
def dream() -> Pair:
    return pair_of(DREAM)


def adaptive(**options: Any) -> SamplingParams:
    defaults = {"gen_length": 20, "transfer": "adaptive", "max_lookahead": 6, "return_history": True}
    return SamplingParams(**{**defaults, **options})


CASES = {
    "greedy": adaptive(),
    "greedy, mostly diffusion": adaptive(mixture_weight=0.8, max_lookahead=9),
    "greedy, verifier only": adaptive(mixture_weight=0.0),
    "greedy, all at once": adaptive(mixture_weight=0.9, max_lookahead=99),
    "drawn": adaptive(temperature=1.0, mixture_weight=0.7, seed=5),
    "drawn, cool": adaptive(temperature=0.3, mixture_weight=0.6, seed=2**40),
    "drawn, verifier only": adaptive(temperature=1.5, mixture_weight=0.0, seed=7),
    "one at a time": adaptive(max_lookahead=1, temperature=1.0),
    "in blocks": adaptive(block_length=10, mixture_weight=0.8),
}


def expected(models: Models, prompt: list[int], sampling: SamplingParams) -> list[Iteration]:
    sequence = np.array([*prompt, *[MASK] * sampling.gen_length])
    return slow_adaptive.decode(models, sequence, sampling)


def check(updates: list[StepUpdate], history: np.ndarray, iterations: list[Iteration]) -> None:
    np.testing.assert_array_equal(history, [i.sequence for i in iterations])
    for update, iteration in zip(updates, iterations, strict=True):
        assert update.positions.tolist() == iteration.window
        assert update.provisional.tolist() == iteration.draft
        assert update.committed.tolist() == [n < iteration.accepted for n in range(len(iteration.window))]


@SLOW
@pytest.mark.parametrize("together", [4, 16])
@pytest.mark.parametrize("family", ["dream", "llada"])
def test_every_iteration_equals_the_slow_copy(family: str, together: int, request: pytest.FixtureRequest):
    pair: Pair = request.getfixturevalue(family)
    asked = [(s, prompt) for s in CASES.values() for prompt in PROMPTS[:2]]
    partly = 0
    for some in batched(asked, together):
        updates: list[StepUpdate] = []
        outputs = pair.generate(*map(list, zip(*some, strict=True)), on_step=updates.append)
        for n, ((sampling, prompt), output) in enumerate(zip(some, outputs, strict=True)):
            iterations = expected(pair.models, prompt, sampling)
            assert output.history is not None
            check([u for u in updates if u.request == n], output.history, iterations)
            assert output.nfe == len(iterations)
            assert output.token_ids == iterations[-1].sequence[len(prompt) :].tolist()
            partly += sum(1 < i.accepted < len(i.window) for i in iterations)
    assert partly > 10, "prefixes are cut in the middle too"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dream", "llada"])
def test_the_likeliest_are_those_of_the_mixture(family: str, request: pytest.FixtureRequest):
    pair: Pair = request.getfixturevalue(family)
    asked = [dataclasses.replace(s, logprobs=4) for s in (CASES["greedy"], CASES["drawn"])]
    outputs = pair.generate([*asked, CASES["greedy"]], [PROMPTS[1]] * 3)
    assert outputs[2].top_logprobs is None
    for sampling, output in zip(asked, outputs, strict=False):
        share, start = sampling.effective("mixture_weight"), len(PROMPTS[1])
        before = np.array([*PROMPTS[1], *[MASK] * sampling.gen_length])
        assert output.history is not None
        assert output.top_logprobs is not None
        for after in output.history:
            d = pair.models.diffusion(before).astype(np.float64)
            d = np.concatenate([d[:1], d[:-1]]) if pair.models.shift else d
            for at in np.flatnonzero(before != after):
                v = pair.models.verifier(after[:at]).astype(np.float64)[-1]
                exact = share * d[at] + (1 - share) * v
                exact[MASK] = -np.inf
                exact -= np.logaddexp.reduce(exact)
                top = output.top_logprobs[at - start]
                assert top is not None
                assert list(top)[:4] == np.argsort(-exact, kind="stable")[:4].tolist()
                assert list(top.values()) == pytest.approx(exact[list(top)], abs=1e-4)
            before = after


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_diffusion_model_alone_accepts_whole_windows(
    family: str, temperature: float, request: pytest.FixtureRequest
):
    pair: Pair = request.getfixturevalue(family)
    for output in pair.generate(adaptive(mixture_weight=1.0, temperature=temperature)):
        assert output.history is not None
        left = [int((state == MASK).sum()) for state in output.history]
        assert left == [14, 8, 2, 0]


@pytest.fixture(scope="module", params=[LLADA, DREAM], ids=["llada", "dream"])
def agreed(request: pytest.FixtureRequest) -> LLM:
    """A model and a verifier of the same opinion."""
    model = wordwise(request.param)
    return LLM(model, verifier=wordwise(CAUSAL, model))


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_verifier_of_the_same_opinion_accepts_whole_windows(agreed: LLM, temperature: float, share: float):
    """Without the draft's noise in the target (quirk Q17) drawn tokens would be rejected."""
    sampling = adaptive(mixture_weight=share, temperature=temperature, max_lookahead=8)
    output = agreed.generate(prompt_token_ids=[[1, 2]], sampling=sampling)[0]
    assert output.nfe == 3
    assert len(set(output.token_ids)) == 1 if temperature == 0 else len(set(output.token_ids)) > 5


def test_the_verifier_alone_accepts_its_own_greedy_text():
    """A diffusion model of one opinion is followed only as long as the verifier would say the same."""
    model = wordwise(LLADA)
    verifier = tiny(CAUSAL, seed=3)
    llm, plain = LLM(model, verifier=verifier), LLM(verifier)
    updates: list[StepUpdate] = []
    sampling = adaptive(mixture_weight=0.0, gen_length=12)
    token = llm.generate(prompt_token_ids=[[7]], sampling=sampling, on_step=updates.append)[0].token_ids[0]
    text = [7, *[token] * 12]
    says = plain.logits([text])[0].argmax(axis=1)
    for update in updates:
        agree = says[update.positions[1:] - 1] == token
        assert update.committed.tolist() == [True, *np.cumprod(agree, dtype=bool).tolist()]


@pytest.mark.parametrize("vocab", [270, 340])
@pytest.mark.slow
def test_vocabularies_of_different_sizes(vocab: int):
    """The mask id is beyond the smaller one; the other has rows that may not be chosen."""
    pair = pair_of(DREAM, tiny(dataclasses.replace(CAUSAL, vocab_size=vocab)))
    common = min(vocab, VOCAB)
    logits = pair.models.diffusion

    def cut(ids: np.ndarray) -> np.ndarray:
        return logits(ids)[:, :common]

    models = pair.models._replace(diffusion=cut)
    hot = adaptive(temperature=30.0, mixture_weight=0.9, gen_length=32, max_lookahead=32)
    for sampling in (adaptive(), hot):
        for prompt in PROMPTS:
            (output,) = pair.generate(sampling, [prompt])
            iterations = expected(models, prompt, sampling)
            assert output.token_ids == iterations[-1].sequence[len(prompt) :].tolist()
            assert max(output.token_ids) < common


@pytest.fixture(scope="module")
def short() -> LLM:
    """Its tokenizer defines the first 200 ids."""
    return LLM(tiny(dataclasses.replace(LLADA, token_limit=200)), verifier=tiny(CAUSAL))


@pytest.mark.parametrize("options", [{}, {"undefined_tokens": "banned"}])
def test_ids_without_a_meaning_are_kept_out(options: dict[str, Any], short: LLM):
    sampling = adaptive(temperature=50.0, mixture_weight=1.0, gen_length=60, **options)
    assert max(short.generate(prompt_token_ids=[[1]], sampling=sampling)[0].token_ids) < 200
    free = dataclasses.replace(sampling, undefined_tokens="official")
    assert max(short.generate(prompt_token_ids=[[1]], sampling=free)[0].token_ids) >= 200


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(
    "masked", [[0, 1, 2, 5, 9, 10], [3], [0], [1, 4, 6, 8, 11]], ids=lambda masked: f"{masked}"
)
def test_infill(masked: list[int], family: str, request: pytest.FixtureRequest):
    pair: Pair = request.getfixturevalue(family)
    sequence = np.arange(12) * 7
    sequence[masked] = MASK
    for sampling in (adaptive(max_lookahead=4), adaptive(temperature=0.7, mixture_weight=0.8)):
        iterations = slow_adaptive.decode(pair.models, sequence, sampling)
        output = pair.llm.infill(token_ids=[sequence], sampling=sampling)[0]
        np.testing.assert_array_equal(output.history, [i.sequence for i in iterations])


class TestCompany:
    """Nothing but a request's own parameters decides its tokens."""

    others = (
        SamplingParams(gen_length=6, return_history=True),
        SamplingParams(gen_length=6, cache="dual", block_length=3, return_history=True),
    )

    @pytest.mark.parametrize(
        ("family", "names"),
        [
            ("llada", ["drawn, cool", "one at a time"]),
            pytest.param("llada", list(CASES), marks=SLOW),
            pytest.param("dream", list(CASES), marks=SLOW),
        ],
        ids=["llada-few", "llada-all", "dream-all"],
    )
    @pytest.mark.slow
    def test_alone_or_together(self, family: str, names: list[str], request: pytest.FixtureRequest):
        llm = request.getfixturevalue(family).llm
        sampling = [*(CASES[name] for name in names), *self.others]
        prompts = [PROMPTS[n % 3] for n in range(len(sampling))]
        alone = [
            llm.generate(prompt_token_ids=[p], sampling=s)[0] for p, s in zip(prompts, sampling, strict=True)
        ]
        for order in (range(len(prompts)), reversed(range(len(prompts)))):
            order = list(order)
            together = llm.generate(
                prompt_token_ids=[prompts[i] for i in order], sampling=[sampling[i] for i in order]
            )
            for i, output in zip(order, together, strict=True):
                np.testing.assert_array_equal(output.history, alone[i].history)

    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({"chunks": ChunkConfig(ffn=3, query=2, kv=2, heads=2, logits=5)}, marks=SLOW),
            {"max_num_logits": 7},
            {"memory": "4GiB"},
            {"max_num_batched_tokens": 1},
        ],
    )
    @pytest.mark.parametrize("copies", [1, pytest.param(4, marks=SLOW)])
    @pytest.mark.slow
    def test_chunks_budget_and_splits(self, copies: int, options: dict[str, Any], dream: Pair):
        other = LLM(tiny(DREAM), verifier=tiny(CAUSAL), **options)
        sampling = list(CASES.values())[:3] * copies
        prompts = PROMPTS * copies
        for a, b in zip(
            dream.generate(sampling, prompts),
            other.generate(prompt_token_ids=prompts, sampling=sampling),
            strict=True,
        ):
            np.testing.assert_array_equal(a.history, b.history)


@pytest.fixture(scope="module")
def free(dream: Pair) -> list[int]:
    """What follows ids 5 and 6 where nothing ends a text."""
    return dream.generate(adaptive(mixture_weight=0.8), [[5, 6]])[0].token_ids


class TestEnd:
    @pytest.mark.slow
    def test_an_end_id_ends_the_text_where_it_is_accepted(self, free: list[int]):
        at = 7
        assert free[at] not in free[:at]
        config = dataclasses.replace(DREAM, eos_id=free[at])
        # The end id in the prompt ends nothing (the published code looks at it).
        pair = pair_of(config)
        plain = pair.generate(adaptive(mixture_weight=0.8, early_stop=False), [[5, 6]])[0]
        stopped = pair.generate(adaptive(mixture_weight=0.8), [[5, 6], [free[at], 6]])
        assert plain.token_ids == free
        assert stopped[0].token_ids == free[: at + 1]
        assert stopped[0].finish_reason == "stop"
        assert stopped[0].nfe < plain.nfe
        assert stopped[1].nfe > 1
        models = pair.models._replace(stops=(free[at],))
        for prompt, output in zip(([5, 6], [free[at], 6]), stopped, strict=True):
            iterations = expected(models, prompt, adaptive(mixture_weight=0.8))
            np.testing.assert_array_equal(output.history, [i.sequence for i in iterations])

    def test_a_banned_end_id_is_never_chosen(self, free: list[int]):
        llm = LLM(tiny(dataclasses.replace(DREAM, eos_id=free[0])), verifier=tiny(CAUSAL))
        sampling = adaptive(mixture_weight=0.8, logits_eos_inf=True)
        assert free[0] not in llm.generate(prompt_token_ids=[[5, 6]], sampling=sampling)[0].token_ids


class TestRefusals:
    @pytest.mark.parametrize(
        "options",
        [
            {"cfg_scale": 1.0},
            {"suffix_window": 5},
            {"official_forcing": True, "cache": "dual"},
            {"remasking": "random"},
            {"confidence_eos_eot_inf": "fixed"},
            {"prompt_masks": "official"},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_what_it_has_not(self, options: dict[str, Any]):
        with pytest.raises(RequestError, match=f"'adaptive' .*: leave {next(iter(options))} at"):
            adaptive(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mixture_weight": 1.5}, r"mixture_weight is 1\.5, expected a number from 0 to 1"),
            ({"mixture_weight": float("nan")}, "mixture_weight is nan"),
            ({"max_lookahead": 0}, "max_lookahead is 0, expected an integer from 1"),
            ({"alg": "entropy"}, "alg 'entropy' brings its own order"),
        ],
    )
    def test_parameters(self, options: dict[str, Any], message: str):
        with pytest.raises(RequestError, match=message):
            adaptive(**options)

    @pytest.mark.parametrize("call", ["generate", "infill"])
    def test_no_verifier(self, call: str):
        llm = LLM(tiny(LLADA))
        ids = {"generate": {"prompt_token_ids": [[1]]}, "infill": {"token_ids": [[1, MASK]]}}[call]
        with pytest.raises(RequestError, match="'adaptive' needs an autoregressive verifier"):
            getattr(llm, call)(**ids, sampling=adaptive())

    def test_ids_that_the_verifier_lacks(self):
        verifier = tiny(dataclasses.replace(CAUSAL, vocab_size=100))
        llm = LLM(tiny(LLADA), verifier=verifier, verifier_shares_ids=True)
        with pytest.raises(RequestError, match="token id 100 is unknown to the verifier"):
            llm.generate(prompt_token_ids=[[1], [99, 100]], sampling=adaptive())
        ids = llm.infill(token_ids=[[5, MASK, 99, MASK]], sampling=adaptive())[0].token_ids
        assert max(ids) < 100


class TestMemory:
    vocab = 32768

    @pytest.mark.parametrize("chunks", [1, 4])
    def test_the_largest_array_is_a_chunk_of_logits(self, chunks: int):
        wide, causal = (dataclasses.replace(c, vocab_size=self.vocab) for c in (DREAM, CAUSAL))
        sampling = adaptive(gen_length=40, max_lookahead=32)
        requests = [generation_request(i, np.zeros(90, int), sampling, wide) for i in range(8)]
        keys = VerifierKeys(Verifier(abstract_params(causal, "float32"), causal), 1024)
        windows = [span.window for span in keys.hold(requests)]
        batch = pack_adaptive(requests, windows, wide, causal, keys.pool.book, entry_of(requests)).batch
        assert batch.head.row.shape == (256,)
        cut = ChunkConfig(logits=chunks)
        run = functools.partial(denoise_adaptive, config=wide, verifier_config=causal, chunks=cut)
        params = (abstract_params(config, "float32") for config in (wide, causal))
        assert largest_intermediate(run, *params, batch, keys.pool.abstract) == 256 // chunks * self.vocab

    @pytest.mark.slow
    @pytest.mark.parametrize("sampling", [pytest.param(SamplingParams(gen_length=4), marks=SLOW), adaptive()])
    def test_a_verifier_counts_against_the_memory(self, sampling: SamplingParams):
        weights = [param_bytes(config, "float32") for config in (LLADA, CAUSAL)]
        memory = sum(weights) + (64 << 20)
        llm = LLM(tiny(LLADA), verifier=tiny(CAUSAL), memory=memory, host_memory="0")
        llm.generate(prompt_token_ids=[[1]], sampling=sampling)
        large = dataclasses.replace(CAUSAL, vocab_size=300_000)  # 73 MiB
        options: dict[str, Any] = {"verifier_shares_ids": True, "memory": memory, "host_memory": "0"}
        with pytest.raises(MemoryBudgetError, match="memory="):
            LLM(tiny(LLADA), verifier=tiny(large), **options)
