"""Requests with a cache that are longer than a whole step: their refreshes are cut to fit beside the pool."""

import bisect
import dataclasses

import numpy as np
import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params, param_bytes
from jdllm.pallas.device import target
from jdllm.pallas.masked_logits import Level
from jdllm.planning.budget import StepRoom
from jdllm.planning.plan import Bucket
from jdllm.planning.step_needs import StepNeeds

PROMPT = np.random.default_rng(0).integers(1, 100, 2000)
SAMPLING = SamplingParams(gen_length=16, block_length=8, early_stop=False, return_history=True)
ROWS, POOL = 2048, 3 << 20
WHOLE_ROWS = 128


@pytest.fixture(scope="module")
def model(config: ModelConfig, params: Params) -> Transformer:
    """For sequences of any length: what a small budget cuts are the rows."""
    return Transformer(dataclasses.replace(config, max_positions=16 * ROWS), params)


@pytest.fixture(scope="module")
def memory(config: ModelConfig) -> int:
    """Room for refreshes that are cut, and for no whole one."""
    needs = StepNeeds(config, "float32", target(), None, ())
    room = bisect.bisect_left(range(1 << 30), True, key=lambda size: needs.refresh_fits(ROWS, StepRoom(size)))
    plan = needs.refresh(Bucket(0, ROWS, 8), StepRoom(room), Level.TOP)
    assert plan.fits
    assert not plan.chunks.layers_whole
    return param_bytes(config, "float32") + POOL + room


def limited(model: Transformer, memory: int, keys: str = "auto") -> LLM:
    options = {"memory": memory, "host_memory": 0, "kv_pool": POOL, "max_num_batched_tokens": WHOLE_ROWS}
    return LLM(model, kv_cache_dtype=keys, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ("auto", {"cache": "dual"}),
        ("auto", {"cache": "head_sparse", "retention": 0.5}),
        ("auto", {"cache": "sparse", "retention": 0.5, "block_length": 40, "gen_length": 40}),
        ("auto", {"cache": "prefix"}),
        ("fp8", {"cache": "dual"}),
    ],
)
def test_a_cut_refresh_gives_the_tokens_of_a_whole_one(
    model: Transformer, memory: int, keys: str, options: dict
):
    sampling = dataclasses.replace(SAMPLING, **options)
    (cut,), (whole,) = (
        llm.generate(prompt_token_ids=[PROMPT], sampling=sampling)
        for llm in (
            limited(model, memory, keys),
            LLM(model, max_num_batched_tokens=ROWS, kv_cache_dtype=keys),
        )
    )
    np.testing.assert_array_equal(cut.history, whole.history)


def test_a_longer_request_is_refused_with_options_that_make_room(model: Transformer, memory: int):
    with pytest.raises(RequestError, match="pages of the KV pool"):
        limited(model, memory).generate(
            prompt_token_ids=[np.tile(PROMPT, 8)], sampling=dataclasses.replace(SAMPLING, cache="dual")
        )
