"""The recorded runs of the official samplers again, on a card: f32 products must not fall back to TF32."""

from typing import Any

import jax
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.engine import Engine
from tests.decoding import test_trajectories as recorded
from tests.engines import engine_of
from tests.prefilling import test_recorded_runs as long

pytestmark = pytest.mark.gpu

case, model = recorded.case, recorded.model


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


@pytest.mark.parametrize(("family", "name"), recorded.RECORDED)
def test_every_token_of_every_step(family: str, name: str, case: dict[str, Any], model: LLM):
    recorded.test_every_token_of_every_step(family, name, case, model)


long_model = long.model


@pytest.fixture(scope="module")
def long_engine(long_model: tuple[Params, ModelConfig]) -> Engine:
    return engine_of(*long_model, Executables("gpu"), long.ROWS, pages=200)


@pytest.mark.parametrize("name", long.case_names())
def test_every_stage_of_a_long_context(
    name: str, long_engine: Engine, long_model: tuple[Params, ModelConfig]
):
    long.test_a_recorded_run_is_reproduced(long_engine, long_model, name)


def test_logits(llm: LLM, goldens: dict[str, np.ndarray]):
    logits = llm.logits(goldens["fwd_batch.input_ids"])
    np.testing.assert_allclose(logits, goldens["fwd_batch.logits"], atol=2e-4, rtol=1e-4)
