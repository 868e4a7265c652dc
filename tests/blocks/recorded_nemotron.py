"""Recorded runs of Nemotron-Labs-Diffusion's samplers, as requests and what they return."""

from typing import Any, NamedTuple

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from tests.helpers import Golden

NEMOTRON = Golden("nemotron_labs_diffusion")
MASK = NEMOTRON.json("goldens")["mask_id"]


class Generated(NamedTuple):
    """A recorded run: what is asked, the answer, and how many evaluations of the model were counted."""

    name: str
    prompt: np.ndarray
    sampling: SamplingParams
    output: list[int]
    nfe: int


def cases(mode: str) -> dict[str, dict[str, Any]]:
    """The settings of the runs of one mode: "ar", "dlm" or "spec". Those with a thinking budget are left out:
    jdllm has none."""
    recorded = NEMOTRON.json("trajectories")["cases"]
    own = {name: case for name, case in recorded.items() if case["mode"] == mode}
    return {name: case for name, case in own.items() if "max_thinking_tokens" not in case}


def stop_ids(case: dict[str, Any]) -> tuple[int, ...]:
    """The ends of a run beside that of the checkpoint."""
    return (case["eos_token_id"],) if "eos_token_id" in case else ()


def autoregressive_runs() -> list[Generated]:
    tensors, runs = NEMOTRON.tensors("trajectories"), []
    for name, case in cases("ar").items():
        [prompt], [output] = tensors[f"{name}.prompt"], tensors[f"{name}.output"]
        sampling = SamplingParams(
            generation_mode="autoregressive",
            gen_length=case["max_new_tokens"],
            stop_token_ids=stop_ids(case),
        )
        runs.append(Generated(name, prompt, sampling, output[len(prompt) :].tolist(), case["nfe"]))
    return runs
