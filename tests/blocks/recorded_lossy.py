"""Recorded runs of S2D2's loop, as requests with the numbers that accepted their drafts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jdllm.compiling.executables import Executable, Executables, Program
from jdllm.decoding.lossy_speculation import AcceptanceDraws, keyed_draws
from jdllm.decoding.sampling import SamplingParams
from tests.helpers import Golden

S2D2 = Golden("sdar_s2d2")

_POLICIES = {"score_threshold": "score", "score_hysteresis": "hysteresis", "mask_span_length": "span"}
_OPTIONS = {
    "confidence_threshold": "threshold",
    "do_verify_score_threshold": "verify_score",
    "hysteresis_threshold_on": "verify_on",
    "hysteresis_threshold_off": "verify_off",
    "min_ssd_span_length": "verify_span",
    "score_penalty_coef": "verify_cost",
    "ssd_entropy_temperature": "verify_sharpness",
    "always_check_high_confidence": "commit_sure",
    "cache_ver": "causal_rows",
}
_DRAFT, _VERIFICATION = 1, 3
_LARGEST = 1e6


class LossyRun(NamedTuple):
    """A recorded run: what is asked, the whole sequence after each evaluation that drafts or verifies, and
    the draws by evaluation and position, -1 where there was none."""

    name: str
    prompt: np.ndarray
    sampling: SamplingParams
    states: np.ndarray
    draws: np.ndarray


def lossy_runs() -> list[LossyRun]:
    """All of them; the seed of each is its place."""
    tensors, mask_id = S2D2.tensors("trajectories"), S2D2.json("goldens")["mask_id"]
    runs = []
    for seed, (name, case) in enumerate(S2D2.json("trajectories")["cases"].items()):
        length = case["block_length"]
        given = {ours: case[theirs] for theirs, ours in _OPTIONS.items() if theirs in case}
        given["verify_score"] = min(given["verify_score"], _LARGEST)
        sampling = SamplingParams(
            gen_length=case["gen_length"],
            block_length=length,
            steps=case["denoising_steps"] * -(-case["gen_length"] // length),
            transfer="lossy_speculation",
            verify_policy=_POLICIES[case["do_verify_policy"]],
            verify_cost_each=case["do_verify_score_type"] == "difference_dynamic",
            early_stop=False,
            return_history=True,
            seed=seed,
            **given,
        )
        assert case["draft_ver"] == case["cache_ver"]
        kinds, states = tensors[f"{name}.kinds"], tensors[f"{name}.states"][:, 0]
        evaluated = np.isin(kinds, [_DRAFT, _VERIFICATION])
        [prompt] = tensors[f"{name}.prompt"]
        draws = _draws(tensors, name, kinds[evaluated], states[evaluated], mask_id)
        runs.append(LossyRun(name, prompt, sampling, states[evaluated], draws))
    return runs


def _draws(
    tensors: dict[str, Any], name: str, kinds: np.ndarray, states: np.ndarray, mask_id: int
) -> np.ndarray:
    """The draws of each verification at the positions of the first run of masks that it finds."""
    draws = np.full(states.shape, -1, np.float32)
    windows = tensors[f"{name}.window"][tensors[f"{name}.kinds"] == _VERIFICATION]
    calls = np.flatnonzero(kinds == _VERIFICATION)
    for call, (evaluation, (start, stop)) in enumerate(zip(calls, windows, strict=True)):
        count = tensors[f"{name}.uniform_counts"][call]
        masked = states[evaluation - 1, start:stop] == mask_id
        first = start + int(masked.argmax())
        assert masked[first - start :][:count].all()
        assert not masked[first - start :][count : count + 1].any()
        draws[evaluation, first : first + count] = tensors[f"{name}.uniforms"][call, :count]
    return draws


def recorded_draws(runs: Sequence[LossyRun]) -> AcceptanceDraws:
    """The draws of runs by their seeds; other seeds have their own."""
    most = [max(sizes) for sizes in zip(*(run.draws.shape for run in runs), strict=True)]
    table = np.full((len(runs), *most), -1, np.float32)
    for seed, run in enumerate(runs):
        assert run.sampling.seed == seed
        table[seed, : len(run.draws), : run.draws.shape[1]] = run.draws
    recorded = jnp.asarray(table)

    def draws(seed: Array, step: Array, segment: Array, positions: Array) -> Array:
        high, low = seed[segment].T
        known = recorded[low, step[segment], positions]
        own = keyed_draws(seed, step, segment, positions)
        return jnp.where((high == 0) & (low < len(runs)), known, own)

    return draws


class Accepting(Executables):
    """Executables whose drafts are accepted by other numbers."""

    def __init__(self, acceptance_draws: AcceptanceDraws):
        super().__init__("cpu")
        self._acceptance_draws = acceptance_draws

    def get(self, program: Program) -> Executable:
        if "causal" in program.static:
            static = {**program.static, "acceptance_draws": self._acceptance_draws}
            program = program._replace(static=static)
        return super().get(program)
