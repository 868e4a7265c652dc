"""A request with a dual cache whose keys are in host memory, on a card: the tokens of the pool."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.compiling.executables import Executables
from jdllm.models.weights import init_params
from jdllm.serving.demands import Kind
from tests.engines import engine_of, finish
from tests.layered import LENGTH, Model, asked, engine_in, layered_of

pytestmark = pytest.mark.gpu

SIZES = {"num_layers": 6, "hidden_size": 1024, "intermediate_size": 3072, "num_heads": 8}


@pytest.mark.parametrize(("shape", "kv_heads"), [("llada-8b", 8), ("dream-7b", 4)])
@pytest.mark.parametrize("kept", [0, 2])
def test_tokens_are_those_of_the_pool(shape: str, kv_heads: int, kept: int):
    config = dataclasses.replace(SHAPES[shape], **SIZES, num_kv_heads=kv_heads)
    model = Model(config, init_params(config, jax.random.key(0), "float32"))
    executables, request = Executables("cuda"), asked(config, LENGTH)
    layered = engine_in(model, layered_of(model, kept), executables)
    pooled = engine_of(model.params, config, executables, 1024, pages=16)
    (_, [found]), (_, [expected]) = (finish(engine, [request]) for engine in (layered, pooled))
    assert layered.stats().parts[Kind.LAYERED]
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.committed_in, expected.committed_in)
    layered.close()
    pooled.close()
