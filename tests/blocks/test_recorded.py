"""Every recorded run of the official samplers of block models, token by token at every step."""

import pytest

from jdllm.llm import LLM
from tests.blocks.recorded import OVERWRITTEN, SDAR, Run, check, sdar_runs
from tests.helpers import slow

SDAR_RUNS = sdar_runs()


def test_all_runs_but_those_that_overwrite_their_prompt():
    cases = SDAR.json("trajectories")["cases"]
    assert len(SDAR_RUNS) == 24
    assert {name for name, case in cases.items() if case.get("prompt_tokens_overwritten")} == {*OVERWRITTEN}


def test_sdar_all_together(sdar: LLM):
    outputs = sdar.generate(
        prompt_token_ids=[run.prompt for run in SDAR_RUNS], sampling=[run.sampling for run in SDAR_RUNS]
    )
    for output, run in zip(outputs, SDAR_RUNS, strict=True):
        check(output, run)


@pytest.mark.parametrize(
    "run", [run if i % 6 == 0 else slow(run) for i, run in enumerate(SDAR_RUNS)], ids=lambda run: run.name
)
def test_sdar_alone(sdar: LLM, run: Run):
    [output] = sdar.generate(prompt_token_ids=[run.prompt], sampling=run.sampling)
    check(output, run)
