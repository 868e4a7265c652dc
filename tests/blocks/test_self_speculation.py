"""Block models without a causal context draft blocks and verify them at block length 1."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.compiling.executables import CAPACITY
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.serving.modes.blocks import Blocks
from jdllm.serving.spec import mask_id_of
from tests.blocks.conftest import seen_sequences
from tests.blocks.recorded import FAST_DLLM_V2, SDAR, sdar_runs
from tests.blocks.rounds_oracle import Rounds
from tests.helpers import Golden, slow

ONE = SamplingParams(gen_length=40, block_length=1, early_stop=False)
SPECULATION: dict[str, Any] = {"generation_mode": "self_speculation"}


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(0, 300, length).astype(np.int32)


@pytest.fixture(params=["sdar", slow("fast_dllm_v2"), slow("llada2")])
def llm(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("rule", [{}, {"transfer": "threshold", "threshold": 0.3}], ids=["once", "threshold"])
def test_tokens_are_those_of_blocks_of_one_position(llm: LLM, rule: dict[str, Any]):
    """In company, prompts in parts, across pages, blocks of several lengths."""
    lengths = [(5, 4), (190, 8), (63, 3), (64, 33), (65, 2), (1, 16), (128, 1)]
    ids = [prompt(n) for n, _ in lengths]
    asked = [ONE.changed(**SPECULATION, **rule, block_length=length) for _, length in lengths]
    expected = llm.generate(prompt_token_ids=ids, sampling=ONE)
    outputs = llm.generate(prompt_token_ids=ids, sampling=asked)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for one, sampling, output in zip(ids, asked, outputs, strict=True):
        [alone] = llm.generate(prompt_token_ids=[one], sampling=sampling)
        assert (alone.token_ids, alone.nfe) == (output.token_ids, output.nfe)


def test_recorded_runs_of_blocks_of_one_position(sdar: LLM):
    """What SDAR's own loop gives, but for the end of its texts, which it does not look for here."""
    runs = [run for run in sdar_runs() if run.sampling.block_length == 1 and not run.sampling.early_stop]
    assert runs
    for run in runs:
        sampling = SamplingParams(gen_length=run.sampling.gen_length, early_stop=False, **SPECULATION)
        [output] = sdar.generate(prompt_token_ids=[run.prompt], sampling=sampling)
        assert output.token_ids == run.states[-1][len(run.prompt) :].tolist()


def test_stored_rows_are_shared_with_blocks_of_one_position(sdar: LLM):
    ids, speculative = prompt(150, 7), ONE.changed(**SPECULATION, block_length=None)
    [first] = sdar.generate(prompt_token_ids=[ids], sampling=speculative)
    outputs = [sdar.generate(prompt_token_ids=[ids], sampling=one)[0] for one in (ONE, speculative)]
    assert [output.num_cached_tokens for output in outputs] == [128, 128]
    assert first.token_ids == outputs[0].token_ids == outputs[1].token_ids


def test_the_text_ends_inside_of_what_is_accepted(sdar: LLM):
    [whole] = sdar.generate(prompt_token_ids=[prompt(20)], sampling=ONE)
    stop = whole.token_ids[9]
    sampling = ONE.changed(**SPECULATION, block_length=16, early_stop=True, stop_token_ids=[stop])
    [output] = sdar.generate(prompt_token_ids=[prompt(20)], sampling=sampling)
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


@pytest.mark.parametrize("threshold", [None, slow(0.2)])
def test_rounds_of_a_model_with_shifted_logits(fast_dllm_v2: LLM, threshold: float | None):
    """Tokens are those of blocks of one position, and evaluations that draft and verify are counted: in
    company, prompts in parts, across pages."""
    rule = {"transfer": "threshold", "threshold": threshold} if threshold else {}
    lengths = [(260, 8), (63, 3), (1, 16)]
    ids = [prompt(n, 2) for n, _ in lengths]
    expected = fast_dllm_v2.generate(prompt_token_ids=ids, sampling=ONE)
    asked = [ONE.changed(**SPECULATION, **rule, block_length=length) for _, length in lengths]
    outputs = fast_dllm_v2.generate(prompt_token_ids=ids, sampling=asked)
    params = load_params(FAST_DLLM_V2.directory, fast_dllm_v2.config, "float32")
    config = fast_dllm_v2.config
    rounds = Rounds(seen_sequences(params, config), mask_id_of(config), threshold)
    for output, other, one, (_, length) in zip(outputs, expected, ids, lengths, strict=True):
        assert (output.token_ids, output.nfe) == rounds(one, 40, length)
        assert (other.token_ids, other.nfe) == (output.token_ids, 40)


@pytest.mark.parametrize(("ids", "told"), [([], "the prompt is empty"), ([1, 2], "mask id 2 at position 1")])
def test_prompts_that_no_draft_follows(ids: list[int], told: str):
    """At block length 1 nothing before them would give the same tokens."""
    config = dataclasses.replace(config_from_hf(SDAR.directory), mask_id=2, bos_id=1)
    with pytest.raises(RequestError, match=told):
        Blocks().spec(ids, SamplingParams(**SPECULATION), config)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": 1.0}, "leave temperature at 0.0"),
        ({"small_block_length": 2}, "small_block_length is for models that denoise"),
        ({"generation_mode": "autoregressive"}, "generation_mode is 'autoregressive'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(sdar: LLM, options: dict[str, Any], told: str):
    with pytest.raises(RequestError, match=told):
        sdar.generate(prompt_token_ids=[[1, 2]], sampling=SamplingParams(**(SPECULATION | options)))


@pytest.mark.slow
@pytest.mark.parametrize("golden", [SDAR, FAST_DLLM_V2], ids=["sdar", "fast_dllm_v2"])
def test_nothing_compiles_after_a_warm_up(golden: Golden):
    sizes: dict[str, Any] = {"max_num_batched_tokens": 64, "kv_pool": "1MiB", "progress": False}
    mask = {"mask_token_id": golden.json("goldens")["mask_id"]}
    with LLM(golden.directory, warmup=True, hf_overrides=mask, **sizes) as llm:
        compiled = llm.executables.compiled
        sampling = [ONE.changed(**SPECULATION, block_length=8, logprobs=logprobs) for logprobs in (None, 1)]
        llm.generate(prompt_token_ids=[prompt(40 * i + 3) for i in range(4)], sampling=sampling * 2)
        if golden is SDAR:  # the other's logits are shifted
            options: list[dict[str, Any]] = [{}, {"causal_rows": True}, {"logprobs": 1}, {"block_length": 16}]
            lossy = [SamplingParams(gen_length=20, transfer="lossy_speculation", **each) for each in options]
            llm.generate(prompt_token_ids=[prompt(40 * i + 3) for i in range(4)], sampling=lossy)
        assert llm.executables.compiled == compiled


def test_all_executables_are_kept_in_memory():
    """Of the largest ladder that an engine has by default."""
    with LLM(SDAR.directory, max_num_batched_tokens=36864, kv_pool="1MiB", progress=False) as llm:
        assert 165 < len(llm.engine.programs()) <= CAPACITY
