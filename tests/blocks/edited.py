"""Recorded runs of the published samplers that edit committed tokens, as requests and what they show."""

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from jdllm.outputs import RequestOutput
from tests.blocks.recorded import LLADA2, Run
from tests.helpers import Golden

LLADA21 = Golden("llada21_edit")
"""Runs alone: its checkpoint is that of `LLADA2`."""


def llada21_runs() -> list[Run]:
    """Those of LLaDA2.1's loop, which stores nothing: each forward is a step."""
    runs = []
    for golden in (LLADA2, LLADA21):
        tensors = golden.tensors("trajectories")
        for name, case in golden.json("trajectories")["cases"].items():
            if case["algo"] != "llada21_generate":
                continue
            gen_length, length = case["gen_length"], case["block_length"]
            # Quotas of a block whose steps end when it is filled are at most the published, constant one.
            steps = -(-length // case["num_to_transfer"])
            sampling = SamplingParams(
                gen_length=gen_length,
                block_length=length,
                steps=steps * -(-gen_length // length),
                transfer="dynamic",
                threshold=case["threshold"],
                editing_threshold=case["editing_threshold"],
                max_post_steps=case["max_post_steps"],
                early_stop=case["eos_early_stop"],
                stop_token_ids=case["eos_id"],
                return_history=True,
            )
            states, [output] = tensors[f"{name}.states"][:, 0], tensors[f"{name}.output"].tolist()
            runs.append(Run(name, tensors[f"{name}.prompt"][0], sampling, states, output))
    return runs


def joint_runs() -> list[Run]:
    """Those of SGLang's `JointThreshold`, without the forwards of whole blocks of the prompt, and of each
    block without what comes behind its last step: the forward that the sampler throws away, or that stores.

    They are told by the number of steps that may follow the last mask.
    """
    tensors, mask_id, runs = LLADA21.tensors("trajectories"), LLADA21.json("goldens")["mask_id"], []
    for name, case in LLADA21.json("trajectories")["cases"].items():
        if case["algo"] != "sglang_joint_threshold":
            continue
        sampling = SamplingParams(
            gen_length=case["gen_length"],
            block_length=case["block_length"],
            transfer="dynamic",
            threshold=case["threshold"],
            editing_threshold=case["edit_threshold"],
            max_post_steps=case["max_post_edit_steps"],
            penalty_lambda=case["penalty_lambda"],
            early_stop=False,
            return_history=True,
        )
        own = tensors[f"{name}.kinds"] == 1
        every, ends = tensors[f"{name}.states"][own, 0], tensors[f"{name}.window_end"][own]
        states = []
        for end in np.unique(ends):
            block = every[ends == end]
            masked = (block[:, :end] == mask_id).any(axis=1)
            # The step that fills the last mask, and those behind it.
            kept = int(masked.sum()) + 1 + case["max_post_edit_steps"]
            assert (block[kept:] == block[min(kept, len(block)) - 1]).all()
            states.append(block[:kept])
        prompt, [output] = tensors[f"{name}.prompt"][0], tensors[f"{name}.output"].tolist()
        runs.append(Run(name, prompt, sampling, np.concatenate(states), output))
    return runs


def check(output: RequestOutput, run: Run) -> None:
    """Every token of every step is the recorded one, and so is the answer, up to where the text ends."""
    np.testing.assert_array_equal(output.history, run.states, err_msg=run.name)
    assert output.nfe == len(run.states)
    assert run.output is not None
    assert output.token_ids[: len(run.output)] == run.output
