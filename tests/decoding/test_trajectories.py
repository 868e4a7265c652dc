"""Every recorded run of the official LLaDA sampler, token by token at every step."""

from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from tests.conftest import LLADA, STOPS

RECORDED = [name for name in LLADA.json("trajectories")["cases"] if name.startswith("off_")]


def sampling_of(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        gen_length=case["gen_length"],
        steps=case["steps"],
        block_length=case["block_length"],
        cfg_scale=case["cfg_scale"],
        temperature=case["temperature"],
        logits_eos_inf=case.get("logits_eos_inf", False),
        confidence_eos_eot_inf="official" if case.get("confidence_eos_eot_inf") else None,
        early_stop=False,
        prompt_masks="official",
        return_history=True,
    )


@pytest.fixture
def model(case: dict[str, Any], request: pytest.FixtureRequest) -> LLM:
    """The model with the end ids that the case was recorded with."""
    if "eos_id" not in case:
        return request.getfixturevalue("llm")
    ids = {"eos_token_id": case["eos_id"], "eot_token_id": case["eot_id"]}
    if ids == STOPS:
        return request.getfixturevalue("stopping_llm")
    return LLM(LLADA.directory, dtype="float32", hf_overrides=ids)


@pytest.fixture
def case(name: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return cases[name]


@pytest.mark.parametrize("name", RECORDED)
def test_every_token_of_every_step(name: str, case: dict, model: LLM, trajectories: dict[str, np.ndarray]):
    prompts, states = trajectories[f"{name}.prompt"], trajectories[f"{name}.states"]
    real = trajectories.get(f"{name}.attention_mask", np.ones_like(prompts)).astype(bool)
    ids = [row[keep] for row, keep in zip(prompts, real, strict=True)]
    outputs = model.generate(prompt_token_ids=ids, sampling=sampling_of(case))
    assert len(outputs) == states.shape[1]
    for row, output in enumerate(outputs):
        unpadded = states[:, row, (~real[row]).sum() :]
        assert output.history is not None
        np.testing.assert_array_equal(output.history, unpadded)
        np.testing.assert_array_equal(output.token_ids, unpadded[-1, len(ids[row]) :])
        assert output.nfe == case["nfe"]


def test_the_recordings_cover_the_options():
    assert {"off_leftpad_cfg", "off_mask_in_prompt", "off_both_eos", "off_batch2_cfg_g16_s8_b8"} <= set(
        RECORDED
    )
