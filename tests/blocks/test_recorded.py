"""Every recorded run of the official samplers of block models, token by token at every step."""

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.blocks.recorded import LLADA2, OVERWRITTEN, SDAR, Run, check, llada2_runs, sdar_runs
from tests.helpers import slow

RUNS = {"sdar": sdar_runs(), "llada2": llada2_runs()}
MASKS = {"sdar": SDAR.json("goldens")["mask_id"], "llada2": LLADA2.json("goldens")["mask_id"]}
ALONE = [(family, run) for family, runs in RUNS.items() for run in runs]


@pytest.fixture
def llm(family: str, request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(family)


def test_all_runs_but_those_that_overwrite_their_prompt():
    cases = SDAR.json("trajectories")["cases"]
    assert {family: len(runs) for family, runs in RUNS.items()} == {"sdar": 24, "llada2": 8}
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


def test_what_llada2_returns(llada2: LLM):
    """Up to the end of the text; without a history the device goes on to the end of the block."""
    tensors = LLADA2.tensors("trajectories")
    for run in RUNS["llada2"]:
        sampling: SamplingParams = run.sampling.changed(return_history=False)
        [output] = llada2.generate(prompt_token_ids=[run.prompt], sampling=sampling)
        np.testing.assert_array_equal(output.token_ids, tensors[f"{run.name}.output"][0])
        assert output.nfe == len(run.states)
