"""Rows that nobody asked for hold anything: no step is lost by them, and no token decided."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.compiling.executables import Executables
from jdllm.decoding import head_decision
from jdllm.decoding.head import where_rows
from jdllm.decoding.sampling import SamplingParams
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.pallas.masked_logits import RowDecision, masked_logits
from jdllm.serving.request import Request
from tests.conftest import BUDGET
from tests.engines import engine_of, finish, generation_request

SMALLEST = -(2**31)
STEPS, BLOCK = 12, 8
CASES = [
    {"cache": "dual"},
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"temperature": 0.7, "transfer": "margin"}, marks=pytest.mark.slow),
]


def poisoned(token: int, value: float) -> Any:
    """`masked_logits` whose rows from the count on hold what a kernel may leave there."""

    def run(hidden: Any, weights: Any, rows: Any, level: Any, *, count: Any) -> RowDecision:
        decision = masked_logits(hidden, weights, rows, level, count=count)
        live = jnp.arange(len(decision.token)) < count

        def undefined(x: jax.Array) -> jax.Array:
            floats = jnp.issubdtype(x.dtype, jnp.floating)
            return where_rows(live, x, jnp.full_like(x, value if floats else token))

        return jax.tree.map(undefined, decision)

    return run


def run(
    params: Params, config: ModelConfig, executables: Executables, options: dict[str, Any]
) -> tuple[list[Request], int]:
    sampling = SamplingParams(
        gen_length=2 * BLOCK,
        block_length=BLOCK,
        steps=STEPS,
        early_stop=False,
        return_history=True,
        **options,
    )
    requests = [generation_request(i, np.arange(3 + i, 9), sampling, config) for i in range(2)]
    engine = engine_of(params, config, executables, BUDGET)
    _, requests = finish(engine, requests)
    return requests, engine.evaluated


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES)
def test_a_generation_of_n_steps_evaluates_n(
    options: dict[str, Any],
    params: Params,
    config: ModelConfig,
    executables: Executables,
    monkeypatch: pytest.MonkeyPatch,
):
    expected, evaluated = run(params, config, executables, options)
    assert evaluated == STEPS
    monkeypatch.setattr(head_decision, "masked_logits", poisoned(SMALLEST, np.nan))
    actual, evaluated = run(params, config, Executables("cpu"), options)
    assert evaluated == STEPS
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours.history, theirs.history)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
