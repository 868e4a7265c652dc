"""Requests that control logits: against the slow sampler, against a ban that every step knows, in company."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.spec import generation_spec, mask_id_of
from tests.conftest import STOPS
from tests.decoding import oracle
from tests.helpers import slow

EOS, EOT = STOPS["eos_token_id"], STOPS["eot_token_id"]
IDS = oracle.Ids(mask=510, eos=EOS, eot=EOT)
VOCAB = 512
NEVER = -1e30
"""What bans an id in float64 and, other than -inf, may be taken from itself."""


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"gen_length": 8, "early_stop": False, "return_history": True, **options})


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 500, rng.integers(8, 20)) for _ in range(count)]


def logits_of(model: LLM, sampling: SamplingParams, begin: int) -> Callable[[np.ndarray], np.ndarray]:
    """The model's logits and, added to them, a number for each id and position of the answer."""
    by = np.zeros((begin + sampling.gen_length, VOCAB))
    for id, bias in (sampling.logit_bias or {}).items():
        by[:, id] += bias
    if sampling.allowed_token_ids is not None:
        by[:, np.setdiff1d(np.arange(VOCAB), sampling.allowed_token_ids)] = NEVER
    by[: begin + sampling.min_tokens, [EOS, EOT, *sampling.stop_token_ids]] = NEVER
    if not sampling.min_tokens:
        by[:begin] = by[begin]
    return lambda ids: model.logits(ids[None])[0].astype(np.float64) + by[: len(ids)]


SOME = tuple(range(40, 200, 3))
EVERYTHING = {
    "allowed": sampled(allowed_token_ids=SOME, steps=4),
    "allowed, blocks, hot": sampled(allowed_token_ids=SOME, temperature=1.0, seed=3, block_length=4),
    "biased": sampled(logit_bias={7: 4.0, 60: -100, 12: 19.0 / 3}),
    "biased, guided": sampled(logit_bias={i: 3.0 for i in range(0, 300)}, cfg_scale=0.7, block_length=4),
    "minimum": sampled(min_tokens=5, logit_bias={EOS: 3.5}),
    "minimum, stop ids, hot": sampled(
        min_tokens=5, stop_token_ids=(3, 4), logit_bias={3: 6.5}, temperature=0.5
    ),
    "all": sampled(
        min_tokens=3, logit_bias={41: 2, EOS: 4, 43: -9}, allowed_token_ids=(*SOME, EOS), temperature=0.7
    ),
    "threshold": sampled(logit_bias=dict.fromkeys(range(100, 300), 3.0), transfer="threshold", threshold=0.6),
    "entropy": sampled(allowed_token_ids=range(50), transfer="entropy_bound"),
    "margin": sampled(allowed_token_ids=range(50), transfer="margin", steps=4),
    "filtered": sampled(allowed_token_ids=SOME, temperature=1.0, top_k=3, seed=5),
    "free": sampled(),
    "free, hot": sampled(temperature=1.0, seed=4),
}


NO_CONTROLS: dict[str, Any] = {"logit_bias": None, "allowed_token_ids": None, "min_tokens": 0}


def test_a_batch_of_all_equals_the_slow_sampler(stopping_llm: LLM):
    """Each is in the company of the others, and some are alone once more."""
    ids, asked = prompts(len(EVERYTHING)), list(EVERYTHING.values())
    outputs = stopping_llm.generate(prompt_token_ids=ids, sampling=asked)
    for prompt, sampling, output in zip(ids, asked, outputs, strict=True):
        if sampling.top_k is None:
            logits = logits_of(stopping_llm, sampling, len(prompt))
            np.testing.assert_array_equal(output.history, oracle.generate(logits, prompt, sampling, IDS))
    for one in range(0, len(ids), 3):
        [alone] = stopping_llm.generate(prompt_token_ids=[ids[one]], sampling=asked[one])
        assert (alone.token_ids, alone.logprobs) == (outputs[one].token_ids, outputs[one].logprobs)
    without = [sampling.changed(**NO_CONTROLS) for sampling in asked]
    plain = stopping_llm.generate(prompt_token_ids=ids, sampling=without)
    same = [a.token_ids == b.token_ids for a, b in zip(outputs, plain, strict=True)]
    assert same == [not sampling.controlled for sampling in asked]


def test_a_filter_sees_what_is_allowed(stopping_llm: LLM):
    """With `top_k` 1 a draw is the likeliest of the allowed ids, whatever is likelier."""
    [prompt] = prompts(1, seed=5)
    asked = sampled(allowed_token_ids=SOME, temperature=2.0, top_k=1, seed=9, steps=1)
    [output] = stopping_llm.generate(prompt_token_ids=[prompt], sampling=asked)
    whole = np.append(prompt, np.full(8, IDS.mask))
    best = logits_of(stopping_llm, asked, len(prompt))(whole)[len(prompt) :].argmax(axis=1)
    assert output.token_ids == best.tolist()


END = 17

BANS: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": tuple(i for i in range(VOCAB) if i != END)},
    "biased": {"logit_bias": {END: -100}},
    "minimum": {"min_tokens": 16},
}
"""Three ways to say `logits_eos_inf`, of a model whose only end is the end of sequence."""

CACHES: dict[str, dict[str, Any]] = {
    "none": {},
    "dual": {"cache": "dual"},
    "dual, threshold": {"cache": "dual", "transfer": "threshold", "threshold": 0.3},
    "prefix": {"cache": "prefix"},
    "sparse": {"cache": "sparse"},
    "head_sparse": {"cache": "head_sparse", "temperature": 0.8, "seed": 2},
    "selective": {"cache": "selective"},
}


@pytest.fixture(scope="module")
def ending_llm(config: ModelConfig, params: Params) -> LLM:
    """The tiny LLaDA with an end that it generates often, and no other."""
    own = dataclasses.replace(config, eos_id=END, eot_id=None)
    return LLM(Transformer(own, params), max_num_batched_tokens=64, kv_pool="16MiB")


@pytest.mark.parametrize(
    ("cache", "bans"), [("dual", ["minimum"]), *(slow(cache, list(BANS)) for cache in CACHES)]
)
def test_ways_to_ban_the_end_agree(ending_llm: LLM, cache: str, bans: list[str]):
    """Full steps, refreshes and reuses, in company of requests that control nothing."""
    how = {"gen_length": 16, "block_length": 8, "early_stop": False, "logprobs": 0, **CACHES[cache]}
    plain = SamplingParams(**how)
    asked = [plain, plain.changed(logits_eos_inf=True), *[plain.changed(**BANS[name]) for name in bans]]
    ids = [prompts(40)[-1]] * len(asked)
    [free, banned, *controlled] = ending_llm.generate(prompt_token_ids=ids, sampling=asked)
    assert END in free.token_ids
    for output in controlled:
        assert output.token_ids == banned.token_ids
        found, expected = (np.array(one.logprobs, np.float64) for one in (output, banned))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for one in range(0 if len(bans) > 1 else len(ids), len(ids)):
        [alone] = ending_llm.generate(prompt_token_ids=[ids[0]], sampling=asked[one])
        assert alone.token_ids == [free, banned, *controlled][one].token_ids


def test_shifted_logits(dream_llm: LLM):
    """A row of Dream predicts the token behind it: the minimum counts positions of tokens, not of rows."""
    [prompt] = prompts(1)
    plain = SamplingParams(gen_length=8, early_stop=False, alg="maskgit_plus")
    [free] = dream_llm.generate(prompt_token_ids=[prompt], sampling=plain)
    ends = tuple(set(free.token_ids))
    asked = plain.changed(min_tokens=5, stop_token_ids=ends, logit_bias=dict.fromkeys(ends, 50.0))
    [output] = dream_llm.generate(prompt_token_ids=[prompt], sampling=asked)
    assert [token in ends for token in output.token_ids] == [False] * 5 + [True] * 3


def test_infilling(llm: LLM, config: ModelConfig):
    mask = mask_id_of(config)
    [output] = llm.infill(
        token_ids=[[5, mask, 6, mask, mask]], sampling=SamplingParams(allowed_token_ids=(9, 11))
    )
    tokens = output.token_ids
    assert (tokens[0], tokens[2]) == (5, 6)
    assert {tokens[1], tokens[3], tokens[4]} <= {9, 11}


def test_listed_ids_are_those_that_are_allowed(llm: LLM):
    asked = SamplingParams(gen_length=4, allowed_token_ids=(9, 11, 12), logprobs=3, early_stop=False)
    [output] = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling=asked)
    assert [set(place or ()) for place in output.outputs[0].top_logprobs or ()] == [{9, 11, 12}] * 4


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bias outside": ({"logit_bias": {512: 1.0}}, "logit_bias has 512, outside the vocabulary .0 to 511"),
    "allowed outside": ({"allowed_token_ids": [4, 600]}, "allowed_token_ids has 600, outside"),
    "only the mask": ({"allowed_token_ids": [510]}, "allowed_token_ids leaves no token"),
    "only the end": ({"allowed_token_ids": [228], "min_tokens": 1}, "allowed_token_ids leaves no token"),
    "only the banned": ({"allowed_token_ids": [228], "logits_eos_inf": True}, "leaves no token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_model_cannot_do_is_refused_before_it_runs(stopping_llm: LLM, case: str):
    options, message = WRONG[case]
    with pytest.raises(RequestError, match=message):
        stopping_llm.generate(prompt_token_ids=[[1]], sampling=SamplingParams(**options))


def test_more_ids_than_there_is_room_for(config: ModelConfig):
    large = dataclasses.replace(config, vocab_size=2048)
    asked = {"logit_bias": dict.fromkeys(range(600, 1110), 1.0), "stop_token_ids": (1, 2), "min_tokens": 1}
    with pytest.raises(RequestError, match=r"logit_bias has 510 ids and min_tokens bans \d that end"):
        generation_spec([1], SamplingParams(**asked), large)


def test_a_sequence_to_infill_has_no_minimum(llm: LLM, config: ModelConfig):
    with pytest.raises(RequestError, match="leave min_tokens out"):
        llm.infill(token_ids=[[5, mask_id_of(config)]], sampling=SamplingParams(min_tokens=1))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"allowed_token_ids": []}, "allowed_token_ids is .., expected at least one token id"),
    "negative id": ({"allowed_token_ids": [-1]}, "allowed_token_ids is"),
    "no id in a list": (
        {"allowed_token_ids": "x"},
        "allowed_token_ids is 'x', expected an integer from 0 to",
    ),
    "no mapping": (
        {"logit_bias": [1]},
        "logit_bias is .1., expected token ids with numbers from -100 to 100",
    ),
    "large bias": ({"logit_bias": {1: 101}}, "expected token ids with numbers from -100 to 100"),
    "infinite bias": ({"logit_bias": {1: -float("inf")}}, "expected token ids with numbers"),
    "no number": ({"logit_bias": {1: True}}, "expected token ids with numbers"),
    "no id": ({"logit_bias": {"a": 1}}, "expected token ids with numbers"),
    "below 0": ({"min_tokens": -1}, "min_tokens is -1"),
    "above the length": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, more than the 8 tokens"),
    "adaptive": ({"logit_bias": {1: 1}, "transfer": "adaptive"}, "transfer 'adaptive' chooses by"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told(case: str):
    options, message = MISTAKES[case]
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_forms_of_the_same_request():
    biases: list[Any] = [{"5": 1, np.int32(6): np.float32(0.5)}, {5: 1.0, 6: 0.5}]
    first, second = (SamplingParams(logit_bias=each) for each in biases)
    assert first == second
    ids: list[Any] = [np.array([3, 4]), [3, 4], range(3, 5)]
    assert all(SamplingParams(allowed_token_ids=each).allowed_token_ids == (3, 4) for each in ids)
    one: Any = np.int64(3)
    assert SamplingParams(allowed_token_ids=one).allowed_token_ids == (3,)


def test_what_changes_nothing_controls_nothing():
    habits: list[dict[str, Any]] = [{"logit_bias": {}}, {"logit_bias": {5: 0}}, {"min_tokens": 0}]
    for habit in habits:
        assert not SamplingParams(**habit).controlled
