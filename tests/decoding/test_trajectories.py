"""Every recorded run of the official samplers, token by token at every step.

Runs of a family share one call of `generate`. The slow lane repeats every run alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.outputs import RequestOutput
from tests.conftest import DREAM, KV_POOL, LLADA, STOPS
from tests.helpers import Golden, slow

LLADA_MOE = Golden("llada_moe")


def llada_sampling(case: dict[str, Any]) -> dict[str, Any]:
    """LLaDA's own sampler, and Fast-dLLM's without a cache, which ignores `steps` where it has a rule."""
    options = {"block_length": case["block_length"], "steps": case["steps"]}
    for rule in ("threshold", "factor"):
        if case.get(rule) is not None:
            options |= {"transfer": rule, rule: case[rule]}
    return options | {
        "cfg_scale": case.get("cfg_scale", 0.0),
        "logits_eos_inf": case.get("logits_eos_inf", False),
        "confidence_eos_eot_inf": "official" if case.get("confidence_eos_eot_inf") else None,
        "prompt_masks": "official",
    }


def dream_sampling(case: dict[str, Any]) -> dict[str, Any]:
    if case["algo"] == "fast_dllm_dream_confidence_threshold":
        # The call left its generation configuration open, and took what the official preset stands for.
        preset = SamplingParams.official("confidence_threshold")
        own = {"alg": preset.alg, "threshold": case["threshold"], "top_k": preset.top_k}
    else:
        assert case.get("top_p") is None
        own = {"alg": case["alg"], "eps": case["eps"], "top_k": case.get("top_k")}
    return own | {"steps": case["steps"], "alg_temp": case.get("alg_temp")}


def sampling_of(family: str, case: dict[str, Any]) -> SamplingParams:
    options = dream_sampling(case) if family == "dream" else llada_sampling(case)
    return SamplingParams(
        gen_length=case["gen_length"],
        temperature=case["temperature"],
        early_stop=False,
        return_history=True,
        **options,
    )


def cases_of(golden: Golden, *prefixes: str) -> list[tuple[str, str]]:
    names = golden.json("trajectories")["cases"]
    return [(golden.family, name) for name in names if name.startswith(prefixes)]


LLADA_RUNS = cases_of(LLADA, "off_", "fast_none_", "fastv1_none_")
DREAM_RUNS = cases_of(DREAM, "maskgit_plus_", "topk_margin_", "entropy_", "fast_nocache_")
MOE_RUNS = cases_of(LLADA_MOE, "off_")
RECORDED = [*LLADA_RUNS, *DREAM_RUNS, *MOE_RUNS]


ALONE = {
    "off_leftpad_cfg",
    "off_mask_in_prompt",
    "off_both_eos",
    "fastv1_none_g32_s16_b16_factor0.5",
    "maskgit_plus_b3_p8_g20_s8",
    "fast_nocache_p13_g24_s24_thr0.4",
    "off_b1_p9_g16_s8_b8_cfg1.5",
}
"""Runs that the default lane repeats alone."""


def case_of(family: str, name: str) -> dict[str, Any]:
    return Golden(family).json("trajectories")["cases"][name]


class Run(NamedTuple):
    """What was recorded: ids and states are those of each row, without padding."""

    prompts: list[np.ndarray]
    states: list[np.ndarray]

    @classmethod
    def read(cls, family: str, name: str) -> "Run":
        tensors = Golden(family).tensors("trajectories")
        prompts, states = tensors[f"{name}.prompt"], tensors[f"{name}.states"]
        real = tensors.get(f"{name}.attention_mask", np.ones_like(prompts)).astype(bool)
        assert states.shape[1] == len(prompts)
        ids = [row[keep] for row, keep in zip(prompts, real, strict=True)]
        return cls(ids, [states[:, row, (~keep).sum() :] for row, keep in enumerate(real)])

    def check(self, outputs: Sequence[RequestOutput], nfe: int) -> None:
        for prompt, states, output in zip(self.prompts, self.states, outputs, strict=True):
            assert output.history is not None
            np.testing.assert_array_equal(output.history, states)
            np.testing.assert_array_equal(output.token_ids, states[-1, len(prompt) :])
            assert output.nfe == nfe


@pytest.fixture
def case(family: str, name: str) -> dict[str, Any]:
    return case_of(family, name)


MODELS = {"llada": "llm", "dream": "dream_llm", "llada_moe": "moe_llm"}
"""The fixture of each family's model."""


@pytest.fixture
def model(family: str, case: dict[str, Any], request: pytest.FixtureRequest) -> LLM:
    """The model with the end ids that the case was recorded with."""
    if "eos_id" not in case:
        return request.getfixturevalue(MODELS[family])
    ids = {"eos_token_id": case["eos_id"], "eot_token_id": case["eot_id"]}
    if ids == STOPS:
        return request.getfixturevalue("stopping_llm")
    return LLM(LLADA.directory, dtype="float32", kv_pool="16MiB", hf_overrides=ids)


def wide_llm(family: str) -> LLM:
    """A model whose steps hold several of the recorded requests."""
    return LLM(Golden(family).directory, dtype="float32", max_num_batched_tokens=128, kv_pool=KV_POOL)


@pytest.mark.parametrize("family", ["llada", "dream", pytest.param("llada_moe", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("shared_executables")
def test_every_token_of_every_step_of_all_together(family: str):
    """All of a family but the few with end ids of their own."""
    cases = {name: case_of(family, name) for owner, name in RECORDED if owner == family}
    cases = {name: case for name, case in cases.items() if "eos_id" not in case}
    runs = {name: Run.read(family, name) for name in cases}
    prompts = [prompt for run in runs.values() for prompt in run.prompts]
    sampling = [sampling_of(family, cases[name]) for name, run in runs.items() for _ in run.prompts]
    outputs = iter(wide_llm(family).generate(prompt_token_ids=prompts, sampling=sampling))
    for name, run in runs.items():
        run.check([next(outputs) for _ in run.prompts], cases[name]["nfe"])
    assert not list(outputs)


@pytest.mark.parametrize(("family", "name"), [run if run[1] in ALONE else slow(*run) for run in RECORDED])
def test_every_token_of_every_step(family: str, name: str, case: dict[str, Any], model: LLM):
    run = Run.read(family, name)
    outputs = model.generate(prompt_token_ids=run.prompts, sampling=sampling_of(family, case))
    run.check(outputs, case["nfe"])


@pytest.mark.parametrize("other", [None, 40, 60])
def test_the_filter_of_the_published_call_shows(other: int | None, dream_llm: LLM):
    """No file states the 50 of the preset: the recordings do, which come out differently with another."""
    name = "fast_nocache_p9_g32_s16_thr0.4"
    published = SamplingParams.official(
        "confidence_threshold",
        gen_length=32,
        steps=16,
        threshold=0.4,
        early_stop=False,
        return_history=True,
    )
    sampling = published.changed(top_k=other)
    tensors = DREAM.tensors("trajectories")
    (output,) = dream_llm.generate(prompt_token_ids=list(tensors[f"{name}.prompt"]), sampling=sampling)
    states = tensors[f"{name}.states"][:, 0]
    assert output.history is not None
    assert output.history.shape != states.shape or (output.history != states).any()


def test_the_recordings_cover_the_options():
    assert {name for _, name in RECORDED} >= ALONE
    llada = {name for _, name in LLADA_RUNS}
    assert {"off_leftpad_cfg", "off_mask_in_prompt", "off_both_eos", "off_batch2_cfg_g16_s8_b8"} <= llada
    assert sum(name.startswith("fast") for name in llada) == 18
    dream = {name for _, name in DREAM_RUNS}
    assert {"maskgit_plus_leftpad", "topk_margin_b3_p8_g20_s8", "entropy_eps0.05"} <= dream
    assert sum(name.startswith("fast_nocache") for name in dream) == 4
    assert len(MOE_RUNS) == 4
