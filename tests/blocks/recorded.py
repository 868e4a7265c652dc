"""Recorded runs of the official samplers of block models, as requests and the sequences that they show."""

from typing import Any, NamedTuple

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from jdllm.outputs import RequestOutput
from tests.helpers import Golden

SDAR, LLADA2, FAST_DLLM_V2 = map(Golden, ("sdar", "llada2", "fast_dllm_v2"))

OVERWRITTEN = ("sdar_p3_g29_b4_s1_static", "sdar_p7_g25_b8_s1_static")
"""Runs in which a quota above the number of masks overwrites the prompt, which jdllm never does."""

_RULES = {
    "low_confidence_static": "schedule",
    "low_confidence_dynamic": "dynamic",
    "sequential": "sequential",
}


class Run(NamedTuple):
    """A recorded run: what is asked, the whole sequence after each denoising step, and the answer.

    What jdllm denoises beyond the recorded steps lies behind the answer. `output` is `None` where nothing
    is recorded beside the states.
    """

    name: str
    prompt: np.ndarray
    sampling: SamplingParams
    states: np.ndarray
    output: list[int] | None = None


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
        states, [output] = tensors[f"{name}.states"][:, 0], tensors[f"{name}.output"].tolist()
        runs.append(Run(name, tensors[f"{name}.prompt"][0], sampling, states, output))
    return runs


def fast_dllm_v2_runs() -> list[Run]:
    """Those of Fast-dLLM v2's loop without its block cache, which is approximate.

    Recorded is what each forward finds. What it changes is seen in the next, at last in the output: a step
    fills masks, and a store gives the first token of the next block.
    """
    golden, runs = FAST_DLLM_V2, []
    tensors, mask_id = golden.tensors("trajectories"), golden.json("goldens")["mask_id"]
    for name, case in golden.json("trajectories")["cases"].items():
        if case["use_block_cache"]:
            continue
        [prompt], [output] = tensors[f"{name}.prompt"], tensors[f"{name}.output"]
        found = np.where(tensors[f"{name}.forward_states"] < 0, mask_id, tensors[f"{name}.forward_states"])
        changed = (found[1:] != found[:-1]).any(axis=1)
        sampling = SamplingParams(
            gen_length=len(output) - len(prompt),
            block_length=case["block_size"],
            small_block_length=case["small_block_size"],
            transfer="threshold",
            threshold=case["threshold"],
            threshold_strict=True,
            early_stop=case["stop_token"] in output,
            stop_token_ids=case["stop_token"],
            return_history=True,
        )
        runs.append(Run(name, prompt, sampling, found[1:][changed], output[len(prompt) :].tolist()))
    return runs


def check(output: RequestOutput, run: Run, mask_id: int) -> None:
    """Every token of every step is the recorded one."""
    history: Any = np.array(output.history)
    count, width = len(run.states), min(history.shape[1], run.states.shape[1])
    np.testing.assert_array_equal(history[:count, :width], run.states[:, :width], err_msg=run.name)
    for beyond in (history[:count, width:], run.states[:, width:]):
        assert (beyond == mask_id).all()
    if run.output is not None:
        assert output.token_ids == run.output
    if not run.name.startswith("gen_"):  # whose output ends with the first token of one more block
        assert output.nfe == count
