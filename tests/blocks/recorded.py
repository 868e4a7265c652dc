"""Recorded runs of the official samplers of block models, as requests and the sequences that they show."""

from typing import Any, NamedTuple

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from jdllm.outputs import RequestOutput
from tests.helpers import Golden

SDAR, LLADA2 = Golden("sdar"), Golden("llada2")

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


def llada2_runs() -> list[Run]:
    """Those of LLaDA2.0's loop, which stores nothing: each forward is a step."""
    tensors, runs = LLADA2.tensors("trajectories"), []
    for name, case in LLADA2.json("trajectories")["cases"].items():
        if case["algo"] != "llada2_generate":
            continue
        gen_length, length = case["gen_length"], case["block_length"]
        steps = min(case["steps"], gen_length // case.get("minimal_topk", 1))
        sampling = SamplingParams(
            gen_length=gen_length,
            block_length=length,
            steps=steps * -(-gen_length // length),
            transfer="dynamic",
            threshold=case["threshold"],
            stop_token_ids=case["eos_id"],
            stop_in_block=case["eos_early_stop"],
            return_history=True,
        )
        runs.append(Run(name, tensors[f"{name}.prompt"][0], sampling, tensors[f"{name}.states"][:, 0]))
    return runs


def check(output: RequestOutput, run: Run, mask_id: int) -> None:
    """Every token of every step is the recorded one."""
    history: Any = np.array(output.history)
    np.testing.assert_array_equal(history, run.states[:, : history.shape[1]], err_msg=run.name)
    assert (run.states[:, history.shape[1] :] == mask_id).all()
    assert output.nfe == len(run.states)
