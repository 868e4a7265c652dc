"""Recorded runs of the official samplers of block models, as requests and the sequences that they show."""

from typing import Any, NamedTuple

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from jdllm.outputs import RequestOutput
from tests.helpers import Golden

SDAR = Golden("sdar")

OVERWRITTEN = ("sdar_p3_g29_b4_s1_static", "sdar_p7_g25_b8_s1_static")
"""Runs in which a quota above the number of masks overwrites the prompt, which jdllm never does."""

_RULES = {
    "low_confidence_static": "schedule",
    "low_confidence_dynamic": "dynamic",
    "sequential": "sequential",
}


class Run(NamedTuple):
    """A recorded run: what is asked, and the whole sequence after each denoising step."""

    name: str
    prompt: np.ndarray
    sampling: SamplingParams
    states: np.ndarray


def sdar_runs() -> list[Run]:
    """Those of SDAR's own loop but for `OVERWRITTEN`; 0 of `kinds` is a prefill, 2 a store."""
    tensors, runs = SDAR.tensors("trajectories"), []
    for name, case in SDAR.json("trajectories")["cases"].items():
        if name in OVERWRITTEN:
            continue
        strategy, length = case["remasking_strategy"], case["block_length"]
        threshold = {"threshold": case["confidence_threshold"]} if "confidence_threshold" in case else {}
        sampling = SamplingParams(
            gen_length=case["gen_length"],
            block_length=length,
            steps=case["denoising_steps"] * -(-case["gen_length"] // length),
            transfer=_RULES[strategy],
            early_stop="stop" in case,
            stop_token_ids=case.get("stop", ()),
            prompt_masks="official",
            return_history=True,
            **threshold,
        )
        denoised = tensors[f"{name}.kinds"] == 1
        [prompt] = tensors[f"{name}.prompt"].reshape(1, -1)
        runs.append(Run(name, prompt, sampling, tensors[f"{name}.states"][denoised, 0]))
    return runs


def check(output: RequestOutput, run: Run) -> None:
    """Every token of every step is the recorded one."""
    history: Any = np.array(output.history)
    np.testing.assert_array_equal(history, run.states[:, : history.shape[1]], err_msg=run.name)
    unseen = run.states[:, history.shape[1] :]
    assert (unseen == SDAR.json("goldens")["mask_id"]).all()
    assert output.nfe == len(run.states)
