"""Every recorded run of the official cached samplers, token by token.

The default lane runs some of them; the slow lane runs all, alone and together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.outputs import RequestOutput
from tests.conftest import DREAM, LLADA
from tests.decoding.test_trajectories import case_of, cases_of, wide_llm
from tests.helpers import Golden, slow

LLADA_RUNS = cases_of(LLADA, "fast_prefix_", "fast_dual_", "fastv1_prefix_", "fastv1_dual_", "sparse_")
DREAM_RUNS = cases_of(DREAM, "fast_prefix_", "fast_dual_", "sparse_")

ALONE = [*LLADA_RUNS[::8], *DREAM_RUNS[::4]]
"""Runs that the default lane repeats alone."""


def sampling_of(family: str, case: dict[str, Any]) -> SamplingParams:
    options: dict[str, Any] = {"cache": case.get("cache", "sparse"), "steps": case["steps"]}
    if options["cache"] == "sparse":
        options |= {"retention": case["keep_ratio"], "pool_kernel": case["kernel_size"] or 1}
    if family == "dream":
        own = {"threshold": case.get("threshold")} if by_confidence(case) else {"eps": case["eps"]}
        options |= {
            "alg": case["alg"],
            "official_forcing": True,
            "top_k": SamplingParams.official().top_k,
            **own,
        }
    else:
        for rule in ("threshold", "factor"):
            if case.get(rule) is not None:
                options |= {"transfer": rule, rule: case[rule]}
    return SamplingParams(
        gen_length=case["gen_length"],
        block_length=case["block_length"],
        early_stop=False,
        return_history=True,
        **options,
    )


def by_confidence(case: dict[str, Any]) -> bool:
    return case["alg"] == "confidence_threshold"


def changes(states: np.ndarray) -> np.ndarray:
    """The states without those that are equal to the one before."""
    return states[np.append(True, (states[1:] != states[:-1]).any(axis=1))]


def check(family: str, name: str, output: RequestOutput) -> None:
    case, states = case_of(family, name), Golden(family).tensors("trajectories")[f"{name}.states"][:, 0]
    assert output.history is not None
    if case["algo"] == "fast_dllm_2025-06" and case["threshold"] is not None:
        # That loop evaluates the block once more when its first step has already finished it.
        assert output.nfe <= case["nfe"]
        np.testing.assert_array_equal(changes(output.history), changes(states))
        return
    np.testing.assert_array_equal(output.history, states)
    assert output.nfe == case["nfe"]


def generated(model: LLM, runs: Sequence[tuple[str, str]]) -> list[RequestOutput]:
    """The runs again, in one call."""
    prompts = [Golden(family).tensors("trajectories")[f"{name}.prompt"][0] for family, name in runs]
    return model.generate(prompt_token_ids=prompts, sampling=[sampling_of(f, case_of(f, n)) for f, n in runs])


@pytest.mark.parametrize("runs", [LLADA_RUNS, DREAM_RUNS], ids=["llada", "dream"])
@pytest.mark.slow
@pytest.mark.usefixtures("shared_executables")
def test_every_token_of_every_step_of_all_together(runs: list[tuple[str, str]]):
    for (family, name), output in zip(runs, generated(wide_llm(runs[0][0]), runs), strict=True):
        check(family, name, output)


@pytest.mark.parametrize(
    ("family", "name"), [run if run in ALONE else slow(*run) for run in [*LLADA_RUNS, *DREAM_RUNS]]
)
def test_every_token_of_every_step(family: str, name: str, llm: LLM, dream_llm: LLM):
    (output,) = generated(dream_llm if family == "dream" else llm, [(family, name)])
    check(family, name, output)


def test_the_recordings_cover_the_policies():
    names = [name for _, name in LLADA_RUNS]
    assert {"sparse", "dual", "prefix"} == {sampling_of(f, case_of(f, n)).cache for f, n in ALONE}
    assert len(names) == 41
    assert sum("sparse" in name for name in names) == 3
    assert sum("sparse" in name for _, name in DREAM_RUNS) == 4
    assert len(DREAM_RUNS) == 16
