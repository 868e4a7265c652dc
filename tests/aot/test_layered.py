"""Llama-3.1-8B layer by layer, for an H200: what a layer needs is planned, however long the prompt."""

import jax
import numpy as np
import pytest

from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.decoding.layered import LayeredSequence
from jdllm.models.weights import abstract_params, param_bytes
from jdllm.planning.aot import compile_for
from jdllm.planning.budget import Budget
from jdllm.planning.layered import Layered, plan_layered

pytestmark = pytest.mark.aot

CONFIG = CAUSAL_SHAPES["llama-3.1-8b"]
GIB = 2**30


@pytest.mark.parametrize(("memory", "prompt"), [(80, 606208), (24, 499712)])
def test_layers_need_what_is_planned(memory: int, prompt: int):
    weights = param_bytes(CONFIG, "bfloat16")
    model = Layered(CONFIG, "bfloat16", Budget(memory * GIB, host=64 * GIB), weights)
    plan = plan_layered(model, prompt, 16)
    assert plan is not None
    params = abstract_params(CONFIG, "bfloat16")
    sequence = LayeredSequence(params, CONFIG, plan.layering, np.zeros(prompt, np.int32), lambda: None)

    def compiled(function, *arguments, donate=(), **static) -> jax.stages.Compiled:
        return compile_for("h200", function, *arguments, donate=donate, **static)

    prefill, generate, last = sequence.compile(compiled)
    stream = plan.layering.rows * CONFIG.hidden_size * 2
    keys = model.keys_bytes(plan.layering.rows)
    for executable, updated, results in ((prefill, stream, keys), (generate, 0, 0), (last, 0, keys)):
        found = executable.memory_analysis()
        assert found.temp_size_in_bytes <= plan.temporaries
        assert found.alias_size_in_bytes >= updated
        assert found.output_size_in_bytes - found.alias_size_in_bytes <= results + 2**20
