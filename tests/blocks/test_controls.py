"""Controls of logits of block models: against whole sequences, and with drafts that the model verifies."""

from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.serving.blocks.request import BlockRequest, block_spec
from jdllm.serving.spec import mask_id_of
from tests.blocks import oracle
from tests.blocks.oracle import Logits
from tests.blocks.recorded_nemotron import NEMOTRON
from tests.causal.running import Build
from tests.engines import finish
from tests.helpers import slow

FREE = SamplingParams(gen_length=16, block_length=8, early_stop=False, return_history=True)
SOME = tuple(range(40, 220))
ENDS = (44, 45, 50)
ASKED: dict[str, SamplingParams] = {
    "allowed": FREE.changed(allowed_token_ids=SOME),
    "biased": FREE.changed(logit_bias=dict.fromkeys(range(60), 2.0)),
    "minimum": FREE.changed(min_tokens=11, stop_token_ids=ENDS, logit_bias=dict.fromkeys(ENDS, 6.0)),
    "free": FREE,
}


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(0, 300, length).astype(np.int32)


def with_controls(logits_of: Logits, sampling: SamplingParams, begin: int, ends: tuple[int, ...]) -> Logits:
    """The model's logits after what a request adds to each of them."""

    def of(tokens: np.ndarray, *further: Any) -> np.ndarray:
        logits = np.array(logits_of(tokens, *further), np.float64)
        for id, by in (sampling.logit_bias or {}).items():
            logits[:, id] += by
        if sampling.allowed_token_ids is not None:
            logits[:, np.setdiff1d(np.arange(logits.shape[1]), sampling.allowed_token_ids)] = -1e30
        if sampling.min_tokens:
            logits[: begin + sampling.min_tokens, list(ends)] = -1e30
        return logits

    return of


def test_each_in_the_company_of_the_others(build: Build, config: ModelConfig, logits_of: Logits):
    ids = [prompt(n, i) for i, n in enumerate((21, 8, 69, 30))]
    specs = [block_spec(one, sampling, config) for one, sampling in zip(ids, ASKED.values(), strict=True)]
    _, ended = finish(build(), [BlockRequest(spec) for spec in specs])
    for request in ended:
        ends = (*config.stop_ids, *request.sampling.stop_token_ids)
        controlled = with_controls(logits_of, request.sampling, len(request.prompt), ends)
        expected = oracle.generate(controlled, request.prompt, 16, 8, request.mask_id)
        np.testing.assert_array_equal(request.history, expected)
        free = oracle.generate(logits_of, request.prompt, 16, 8, request.mask_id)
        assert np.array_equal(expected, free) == (not request.sampling.controlled)


@pytest.mark.parametrize("name", ["sdar", slow("llada2"), slow("fast_dllm_v2")])
def test_verified_tokens_are_those_of_blocks_of_one_position(name: str, request: pytest.FixtureRequest):
    llm: LLM = request.getfixturevalue(name)
    one_by_one = [s.changed(block_length=1, return_history=False) for s in ASKED.values()]
    drafted = [s.changed(generation_mode="self_speculation", block_length=8) for s in one_by_one]
    ids = [prompt(9 + i) for i in range(len(ASKED))]
    expected = llm.generate(prompt_token_ids=ids, sampling=one_by_one)
    outputs = llm.generate(prompt_token_ids=ids, sampling=drafted)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


@pytest.mark.slow
def test_replaced_tokens_are_allowed_too(llada2: LLM):
    asked = FREE.changed(allowed_token_ids=SOME, editing_threshold=0.0, return_history=False)
    [output] = llada2.generate(prompt_token_ids=[prompt(12)], sampling=asked)
    assert set(output.token_ids) <= set(SOME)


@pytest.mark.parametrize(
    "controls",
    [{"min_tokens": 2}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": (1, 2)}, {"bad_words": ((1,),)}],
    ids=str,
)
def test_lossy_speculation_has_none(sdar: LLM, controls: dict[str, Any]):
    with pytest.raises(RequestError, match=f"leave {next(iter(controls))} at"):
        sdar.generate(
            prompt_token_ids=[[1]], sampling=SamplingParams(transfer="lossy_speculation", **controls)
        )


def test_a_sequence_to_infill_has_no_minimum(sdar: LLM):
    with pytest.raises(RequestError, match="leave min_tokens out"):
        sdar.infill(token_ids=[[1, mask_id_of(sdar.config)]], sampling=SamplingParams(min_tokens=1))


@pytest.mark.slow
def test_models_that_generate_in_several_ways():
    """Foretold tokens of blocks are controlled too, and drafts change nothing."""
    with LLM(NEMOTRON.directory, plain_drafts=True, max_num_batched_tokens=256, kv_pool="8MiB") as llm:
        plain = SamplingParams(gen_length=24, early_stop=False, generation_mode="autoregressive")
        [free] = llm.generate(prompt_token_ids=[prompt(20)], sampling=plain)
        end = free.token_ids[0]
        some = {"allowed_token_ids": tuple(i for i in range(300) if i != end), "min_tokens": 5}
        some["logit_bias"] = dict.fromkeys(range(100), 1.0)
        ways = ["autoregressive", "self_speculation", "diffusion", "bidirectional", "auto"]
        asked = [plain.changed(**some, generation_mode=way, block_length=None) for way in ways]
        found = [o.token_ids for o in llm.generate(prompt_token_ids=[prompt(20)] * 5, sampling=asked)]
        assert found[0] == found[1] == found[4] != free.token_ids
        assert all(set(tokens) <= set(some["allowed_token_ids"]) for tokens in found)
        pairs = tuple(zip(free.token_ids, free.token_ids[1:], strict=False))
        [without] = llm.generate(prompt_token_ids=[prompt(20)], sampling=plain.changed(bad_words=pairs))
        assert not set(pairs) & set(zip(without.token_ids, without.token_ids[1:], strict=False))
        for way in ("self_speculation", "diffusion"):
            with pytest.raises(RequestError, match="bad_words has a word of 2 tokens"):
                llm.generate(
                    prompt_token_ids=[[1]], sampling=plain.changed(bad_words=pairs, generation_mode=way)
                )
