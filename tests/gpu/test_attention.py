"""Attention on Hopper against float64, on a card. The implementation is named, so no other can stand in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.attention import attention

pytestmark = pytest.mark.gpu

BF16_RELATIVE = 4e-3


@pytest.fixture(autouse=True)
def card():
    assert jax.default_backend() == "gpu", "this lane needs a card"


def relative(out: jax.Array, reference: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(out, np.float64) - reference) / np.linalg.norm(reference))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 32, 128), (28, 4, 128), (8, 8, 64)])
@pytest.mark.parametrize("rows", [96, 300, 1000, 1056])
def test_attention(heads: int, kv_heads: int, head_dim: int, rows: int):
    rng = np.random.default_rng(rows)
    q, k, v = (
        jnp.asarray(rng.normal(size=(rows, h, head_dim)), jnp.bfloat16) for h in (heads, kv_heads, kv_heads)
    )
    cuts = [0, rows // 5, rows // 2, rows]
    start, end = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for a, b in ((cuts[0], cuts[1]), (cuts[2], cuts[3])):
        start[a:b], end[a:b] = a, b
    out = attention(q, k, v, start, end, scale=head_dim**-0.5, implementation="mosaic_gpu")
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    k64, v64 = (np.repeat(x, heads // kv_heads, axis=1) for x in (k64, v64))
    scores = np.einsum("qhd,shd->qhs", q64, k64) * head_dim**-0.5
    seen = (np.arange(rows) >= start[:, None]) & (np.arange(rows) < end[:, None])
    scores = np.where(seen[:, None], scores, -np.inf)
    full = end > start
    m = scores[full].max(axis=-1)
    p = np.exp(scores[full] - m[..., None])
    o = np.einsum("qhs,shd->qhd", p / p.sum(axis=-1, keepdims=True), v64)
    assert relative(out.o[full], o) < BF16_RELATIVE
    lse = np.asarray(out.m + jnp.log(out.l), np.float64)[full]
    np.testing.assert_allclose(lse, m + np.log(p.sum(axis=-1)), atol=1e-5)
    assert (np.asarray(out.o, np.float32)[~full] == 0).all()
    assert (np.asarray(out.l)[~full] == 0).all()
    assert np.isneginf(np.asarray(out.m)[~full]).all()
