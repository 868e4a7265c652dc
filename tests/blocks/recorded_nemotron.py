"""Recorded runs of Nemotron-Labs-Diffusion's samplers, as requests and what they return."""

from typing import Any, NamedTuple

import numpy as np

from jdllm.decoding.sampling import SamplingParams
from tests.blocks.recorded import Run
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


def speculative_runs(*, adapter: bool) -> list[Generated]:
    """Those that draft with the adapter, or those that draft without it.

    The published loop returns more than it is asked for where it accepts more.
    """
    tensors, runs = NEMOTRON.tensors("trajectories"), []
    for name, case in cases("spec").items():
        if case["lora"] != adapter:
            continue
        rule = {"transfer": "threshold", "threshold": case["threshold"]} if case["threshold"] else {}
        sampling = SamplingParams(
            generation_mode="self_speculation",
            gen_length=case["max_new_tokens"],
            block_length=case["block_length"],
            stop_token_ids=stop_ids(case),
            **rule,
        )
        [prompt], [output] = tensors[f"{name}.prompt"], tensors[f"{name}.output"]
        answer = output[len(prompt) :][: case["max_new_tokens"]].tolist()
        runs.append(Generated(name, prompt, sampling, answer, case["nfe"]))
    return runs


def diffusion_runs(*, causal: bool = True) -> list[Run]:
    """Those with a causal context, or those without.

    A batch is as many runs; its rows share the loop, and nothing else.

    Recorded is what each forward finds. What it changes is seen in the next. The last forward stores the last
    block, which jdllm never does. The published loop looks for the end of the text after a step only: where
    the first token of a block is the end, one more step is recorded, which is left out here.
    """
    tensors, runs = NEMOTRON.tensors("trajectories"), []
    for name, case in cases("dlm").items():
        if case["causal_context"] != causal:
            continue
        rule = {"transfer": "threshold", "threshold": case["threshold"]} if case["threshold"] else {}
        sampling = SamplingParams(
            gen_length=case["max_new_tokens"],
            block_length=case["block_length"],
            stop_token_ids=stop_ids(case),
            stop_in_block=True,
            return_history=True,
            generation_mode="diffusion" if causal else "bidirectional",
            **rule,
        )
        states = np.where(tensors[f"{name}.forward_states"] < 0, MASK, tensors[f"{name}.forward_states"])
        for row, (prompt, output) in enumerate(
            zip(tensors[f"{name}.prompt"], tensors[f"{name}.output"], strict=True)
        ):
            own = states[:, row]
            own = own[1:][(own[1:] != own[:-1]).any(axis=1)]
            whole = (own[:, : len(output)] == output).all(axis=1)
            own = own[: int(whole.argmax()) + 1 if stop_ids(case) and whole.any() else None]
            runs.append(Run(f"{name}.{row}", prompt, sampling, own, output[len(prompt) :].tolist()))
    return runs
