"""Recorded runs of Nemotron-Labs-Diffusion: each request chooses its way of generating."""

from collections.abc import Callable, Iterator

import pytest

from jdllm.decoding.block_sampling import check_blocks
from jdllm.decoding.causal_sampling import check_causal, check_denoising
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.llm import LLM
from jdllm.outputs import RequestOutput
from tests.blocks.recorded_nemotron import MASK, NEMOTRON, Generated, autoregressive_runs

RUNS = autoregressive_runs()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(NEMOTRON.directory, max_num_batched_tokens=256, kv_pool="8MiB", progress=False) as llm:
        yield llm


def check(output: RequestOutput, run: Generated) -> None:
    assert (output.token_ids, output.nfe) == (run.output, run.nfe), run.name


def test_all_runs_but_those_with_a_thinking_budget():
    assert [run.name for run in RUNS] == ["ar_p9", "ar_p40", "ar_eos"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_alone(llm: LLM, run: Generated):
    [output] = llm.generate(prompt_token_ids=[run.prompt], sampling=run.sampling)
    check(output, run)


def test_all_together(llm: LLM):
    prompts, sampling = [run.prompt for run in RUNS], [run.sampling for run in RUNS]
    for output, run in zip(llm.generate(prompt_token_ids=prompts, sampling=sampling), RUNS, strict=True):
        check(output, run)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"generation_mode": None}, "choose generation_mode='autoregressive'"),
        ({"block_length": 8}, "block_length is for models that denoise: a causal model has no blocks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_mode_does_not_take_is_refused(llm: LLM, options: dict[str, object], told: str):
    sampling = SamplingParams(generation_mode="autoregressive").changed(**options)
    with pytest.raises(RequestError, match=told):
        llm.generate(prompt_token_ids=[[1, MASK]], sampling=sampling)


@pytest.mark.parametrize("check", [check_causal, check_denoising, check_blocks])
def test_models_of_one_way_have_no_choice(check: Callable[[SamplingParams], None]):
    with pytest.raises(RequestError, match=r"^generation_mode is for models that generate in several ways"):
        check(SamplingParams(generation_mode="autoregressive"))
