"""Attention of a generated row over a long prompt, a part at a time."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.execution.offload import layered
from jdllm.models.hf_config import config_from_hf
from tests.helpers import Golden

CONFIG = dataclasses.replace(
    config_from_hf(Golden("llama").directory), num_heads=4, num_kv_heads=2, head_dim=8
)
ROWS = 150


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, end: int) -> np.ndarray:
    """In float64, head by head."""
    found = np.zeros(q.shape)
    for head in range(q.shape[1]):
        keys, values = (x[start:end, head // 2].astype(np.float64) for x in (k, v))
        score = keys @ q[0, head] / np.sqrt(q.shape[2])
        weight = np.exp(score - score.max())
        found[0, head] = weight @ values / weight.sum()
    return found


@pytest.mark.parametrize(("start", "end"), [(0, 150), (0, 1), (70, 140), (0, 64), (63, 65), (128, 150)])
@pytest.mark.parametrize("at_once", [64, 1024])
def test_parts_are_put_together(monkeypatch: pytest.MonkeyPatch, start: int, end: int, at_once: int):
    monkeypatch.setattr(layered, "SEEN_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 8), np.float32)
    k, v = (rng.standard_normal((ROWS, 2, 8), np.float32) for _ in range(2))
    wanted = exact(q, k, v, start, end)
    for x in (k, v):
        x[:start] = x[end:] = np.nan
    bounds = jnp.array([start]), jnp.array([end])
    found = layered.over_prompt(jnp.asarray(q), (jnp.asarray(k), jnp.asarray(v)), *bounds, config=CONFIG)
    np.testing.assert_allclose(found.o, wanted, atol=1e-5)
