"""The recorded runs of the official samplers again, on a card: f32 products must not fall back to TF32."""

from typing import Any

import jax
import numpy as np
import pytest

from jdllm.llm import LLM
from tests.decoding import test_trajectories as recorded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:experts are multiplied by a slow, portable form"),  # in f32
]

case, model = recorded.case, recorded.model


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


@pytest.mark.parametrize(("family", "name"), recorded.RECORDED)
def test_every_token_of_every_step(family: str, name: str, case: dict[str, Any], model: LLM):
    recorded.test_every_token_of_every_step(family, name, case, model)


def test_logits(llm: LLM, goldens: dict[str, np.ndarray]):
    logits = llm.logits(goldens["fwd_batch.input_ids"])
    np.testing.assert_allclose(logits, goldens["fwd_batch.logits"], atol=2e-4, rtol=1e-4)
