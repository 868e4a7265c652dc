"""Every recorded run of the official samplers of block models, token by token at every step."""

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.blocks.recorded import (
    FAST_DLLM_V2,
    LLADA2,
    OVERWRITTEN,
    SDAR,
    Run,
    check,
    fast_dllm_v2_runs,
    llada2_runs,
    sdar_runs,
)
from tests.helpers import slow

RUNS = {"sdar": sdar_runs(), "llada2": llada2_runs(), "fast_dllm_v2": fast_dllm_v2_runs()}
MASKS = {golden.family: golden.json("goldens")["mask_id"] for golden in (SDAR, LLADA2, FAST_DLLM_V2)}
ALONE = [(family, run) for family, runs in RUNS.items() for run in runs]


@pytest.fixture
def llm(family: str, request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(family)


def test_all_runs_but_those_that_overwrite_their_prompt():
    cases = SDAR.json("trajectories")["cases"]
    assert {family: len(runs) for family, runs in RUNS.items()} == {
        "sdar": 24,
        "llada2": 8,
        "fast_dllm_v2": 7,
    }
    assert {name for name, case in cases.items() if case.get("prompt_tokens_overwritten")} == {*OVERWRITTEN}


@pytest.mark.parametrize("family", RUNS)
def test_all_together(llm: LLM, family: str):
    runs = RUNS[family]
    outputs = llm.generate(
        prompt_token_ids=[run.prompt for run in runs], sampling=[run.sampling for run in runs]
    )
    for output, run in zip(outputs, runs, strict=True):
        check(output, run, MASKS[family])


@pytest.mark.parametrize(
    ("family", "run"), [each if i % 6 == 0 else slow(*each) for i, each in enumerate(ALONE)]
)
def test_alone(llm: LLM, family: str, run: Run):
    [output] = llm.generate(prompt_token_ids=[run.prompt], sampling=run.sampling)
    check(output, run, MASKS[family])


@pytest.mark.parametrize("family", [slow("llada2"), "fast_dllm_v2"])
def test_answers_without_a_history(llm: LLM, family: str):
    """The device goes on to the end of a block, also where the text ends before."""
    for run in RUNS[family]:
        [output] = llm.generate(
            prompt_token_ids=[run.prompt], sampling=run.sampling.changed(return_history=False)
        )
        assert output.token_ids == run.output
        assert output.nfe >= len(run.states)


def test_pages_are_shared_where_their_last_row_foretells_a_token(fast_dllm_v2: LLM):
    ids = np.random.default_rng(0).integers(0, 500, 128)
    sampling = SamplingParams(gen_length=40, early_stop=False)
    found = [fast_dllm_v2.generate(prompt_token_ids=[ids], sampling=sampling)[0] for _ in range(2)]
    together = fast_dllm_v2.generate(prompt_token_ids=[ids[:100], ids, ids[:96]], sampling=sampling)
    assert found[0].token_ids == found[1].token_ids == together[1].token_ids
    for output, length in ((together[0], 100), (together[2], 96)):
        [alone] = fast_dllm_v2.generate(prompt_token_ids=[ids[:length]], sampling=sampling)
        assert output.token_ids == alone.token_ids
