"""Dream-7B and LLaDA-8B with a cache, layer by layer, for an H200: layers need what is planned."""

import jax
import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.decoding.layered_cache import LayeredCache
from jdllm.execution.paged.selection import Selection
from jdllm.models.weights import abstract_params, param_bytes
from jdllm.planning.aot import compile_for
from jdllm.planning.budget import Budget
from jdllm.planning.layered import Layered, plan_layered

pytestmark = pytest.mark.aot

GIB, BLOCK = 2**30, 32


def selection(length: int) -> Selection:
    """Everything but the last block, of which each head keeps some."""
    row = np.arange(length, dtype=np.int32)
    one, first = np.ones(1, bool), np.full(1, length - BLOCK, np.int32)
    width = np.full(1, 3, np.int32)
    return Selection(
        first, np.full(1, BLOCK, np.int32), row, row // (length - BLOCK), first // 4, one, one, width
    )


@pytest.mark.parametrize(
    ("shape", "length", "retention"),
    [
        ("dream-7b", 409600, None),
        ("llada-8b", 61440, None),
        ("dream-7b", 409600, 0.5),
        ("llada-8b", 61440, 0.5),
        ("llada-8b", 131072, 0.25),
    ],
)
def test_layers_need_what_is_planned(shape: str, length: int, retention: float | None):
    config = SHAPES[shape]
    weights = param_bytes(config, "bfloat16")
    model = Layered(config, "bfloat16", Budget(24 * GIB, host=64 * GIB), weights, 0, retention)
    plan = plan_layered(model, length, 0)
    assert plan is not None
    params = abstract_params(config, "bfloat16")
    cache = LayeredCache(params, config, plan.layering, length, lambda: None)

    def compiled(function, *arguments, donate=(), **static) -> jax.stages.Compiled:
        return compile_for("h200", function, *arguments, donate=donate, **static)

    refresh, reuse, last = cache.compile(compiled, BLOCK, None if retention is None else selection(length))
    stream = plan.layering.rows * config.hidden_size * 2
    keys = model.keys_bytes(plan.layering.stored)
    for executable, updated, results, room in (
        (refresh, stream, keys, plan.temporaries),
        (reuse, keys, 0, model.generating(plan.layering.stored)),
        (last, 0, keys, plan.temporaries),
    ):
        found = executable.memory_analysis()
        assert found.temp_size_in_bytes <= room
        assert found.alias_size_in_bytes >= updated
        assert found.output_size_in_bytes - found.alias_size_in_bytes <= results + 2**20
