"""Layers whose weights are read from their stacks, against layers that are given their own matrices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from jdllm.execution.few_rows import streamed
from jdllm.execution.few_rows.streamed import streamed_of
from jdllm.execution.transformer import embed, packed_ranges, scan_layers
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.weights import abstract_params, init_params
from jdllm.pallas.device import HOPPER, Target
from jdllm.pallas.dispatch import Form
from tests.benchmarks.shapes import small


def run(params: dict, config: ModelConfig, few_rows: int | None) -> jax.Array:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 80, 24))
    rows = Rows(np.arange(24), np.zeros(24, np.int32), np.full(24, 24, np.int32))
    sees = packed_ranges(config, rows)
    h = embed(params, tokens)
    return scan_layers(params, config, h, lambda h, layer: layer.apply(h, sees)[0], few_rows=few_rows)


@pytest.mark.parametrize(
    "shape", ["llada-8b", *(pytest.param(s, marks=pytest.mark.slow) for s in ("dream-7b", "llada-moe-7b"))]
)
def test_hidden_rows_are_the_same(shape: str, monkeypatch: pytest.MonkeyPatch):
    config = small(shape)
    params = jax.tree.map(lambda x: 4 * x, init_params(config, jax.random.key(1), "float32"))
    expected = jax.jit(run, static_argnums=(1, 2))(params, config, None)
    form = Form[None]("kernel", language="triton")
    monkeypatch.setattr(streamed, "SKINNY_MATMUL", SimpleNamespace(default=lambda *_: form))
    actual = jax.jit(run, static_argnums=(1, 2))(params, config, 24)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "rows", "dtype", "device", "taken"),
    [
        ("llada-8b", 32, "bfloat16", HOPPER, {"q", "k", "v", "gate", "up"}),
        ("llada-8b", 64, "float16", HOPPER, {"q", "k", "v", "gate", "up"}),
        ("llada-8b", 65, "bfloat16", HOPPER, set()),
        ("llada-8b", 32, "float32", HOPPER, {"q", "k", "v", "gate", "up"}),
        ("llada-8b", 32, "float32", HOPPER._replace(triton=False), set()),
        ("dream-7b", 32, "bfloat16", HOPPER, {"q", "k", "v", "gate", "up"}),
        ("llada-moe-7b", 32, "bfloat16", HOPPER, {"q", "k", "v"}),
        ("llada-8b", 32, "float32", Target(True, 8.0, "triton"), {"q", "k", "v", "gate", "up"}),
        ("llada-8b", 32, "bfloat16", HOPPER._replace(kernels="xla"), set()),
    ],
)
def test_what_few_rows_stream_on_a_card(
    shape: str, rows: int, dtype: str, device: Target, taken: set[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streamed, "target", lambda: device)
    stack = dict(abstract_params(SHAPES[shape], dtype)["layers"])
    left = dict(stack)
    found = streamed_of(left, rows)
    assert set(stack) - set(left) == taken
    assert (found is None) == (not taken)


def test_nothing_is_taken_elsewhere():
    stack = dict(abstract_params(SHAPES["llada-8b"], "bfloat16")["layers"])
    assert streamed_of(stack, 32) is None
    assert "q" in stack
