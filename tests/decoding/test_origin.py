"""Dream's chance rule with the draws of the recorded runs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.step import SelectionBits
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from tests.decoding.test_trajectories import DREAM, cases_of, sampling_of
from tests.engines import engine_of, finish, generation_request
from tests.helpers import slow

MASK = 509
RECORDED = [name for _, name in cases_of(DREAM, "origin_")]
SHORTEST = "origin_b1_p9_g16_s16"


class Drawing(Executables):
    """Executables whose selection bits are replaced."""

    def __init__(self, executables: Executables, selection_bits: SelectionBits):
        self._executables = executables
        self._selection_bits = selection_bits

    def call(self, function, *args: Any, **static) -> Any:
        return self._executables.call(function, *args, **static, selection_bits=self._selection_bits)


def recorded_bits(before: np.ndarray, draws: np.ndarray, counts: np.ndarray) -> SelectionBits:
    """The draws of the masked positions, row by row.

    `before` `[steps, batch, length]` is what each step saw. Draws are at most 2^-25 from those of their bits.
    """
    bits = np.zeros(before.shape, np.uint32)
    for step, tokens in enumerate(before):
        masked = tokens == MASK
        assert masked.sum() == counts[step]
        bits[step, masked] = np.floor(draws[step, : counts[step]].astype(np.float64) * 2**32)
    table = jnp.asarray(bits)
    return lambda seed, step, segment, positions: table[step[segment], segment, positions]


@pytest.mark.parametrize("name", [name if name == SHORTEST else slow(name) for name in RECORDED])
def test_every_token_of_every_step(
    name: str, dream_config: ModelConfig, dream_params: Params, executables: Executables
):
    case, tensors = DREAM.json("trajectories")["cases"][name], DREAM.tensors("trajectories")
    prompts, states = tensors[f"{name}.prompt"], tensors[f"{name}.states"]
    start = np.pad(prompts, [(0, 0), (0, case["gen_length"])], constant_values=MASK)
    before = np.concatenate([start[None], states[:-1]])
    bits = recorded_bits(before, tensors[f"{name}.uniforms"], tensors[f"{name}.uniform_counts"])
    sampling = sampling_of("dream", case)
    requests = [generation_request(i, ids, sampling, dream_config) for i, ids in enumerate(prompts)]
    drawing = Drawing(executables, bits)
    engine = engine_of(dream_params, dream_config, drawing, 128)
    _, requests = finish(engine, requests)
    for row, request in enumerate(requests):
        np.testing.assert_array_equal(np.stack(request.history), states[:, row])
        assert request.steps == case["nfe"]


def test_the_recordings_are_there():
    assert len(RECORDED) == 3


@pytest.mark.slow
def test_own_draws_commit_about_their_share(dream_llm: LLM):
    """With 4 steps to a vanishing end, a quarter of all positions in each step."""
    sampling = [
        SamplingParams(gen_length=16, steps=4, alg="origin", eps=1e-5, seed=seed, early_stop=False)
        for seed in range(50)
    ]
    counts = np.zeros(4, int)

    def count(update):
        counts[update.step] += update.committed.sum()

    dream_llm.generate(prompt_token_ids=[[1, 2, 3]] * 50, sampling=sampling, on_step=count)
    assert counts.sum() == 800
    np.testing.assert_allclose(counts, 200, atol=5 * np.sqrt(800 * 0.25 * 0.75))
