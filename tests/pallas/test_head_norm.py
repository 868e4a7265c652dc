"""Norm and rotation of heads in one kernel, in interpret mode, against float64 and the primitives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.layers import rms_norm, rotate
from jdllm.pallas.device import Target
from jdllm.pallas.head_norm import api, check_head_norm, head_norm
from jdllm.pallas.head_norm.mosaic_gpu import head_norm_mosaic_gpu

EPS = 1e-6


def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), dtype)


def angles(rows: int, pairs: int) -> tuple[jax.Array, jax.Array]:
    turns = normal(rows, pairs, dtype=jnp.float32)
    return jnp.cos(turns), jnp.sin(turns)


def exactly(x: jax.Array, weight: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> np.ndarray:
    """The same in float64, without rounding in between."""
    wide = np.asarray(x, np.float64)
    wide *= np.asarray(weight, np.float64) / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    a, b = np.split(wide, 2, axis=-1)
    cos, sin = (np.asarray(turn, np.float64)[:, None] for turn in rotation)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_heads_are_normed_and_then_rotated(head_dim: int, dtype):
    q, k = (normal(3, heads, head_dim, dtype=dtype) for heads in (8, 4))
    norms = normal(2, head_dim, dtype=dtype), normal(2, head_dim, dtype=dtype) + 1
    rotation = angles(3, head_dim // 2)
    found = head_norm_mosaic_gpu(q, k, norms, jnp.int32(1), rotation, eps=EPS, chained=True)
    for x, weights, mine in zip((q, k), norms, found, strict=True):
        rounded = rotate(rms_norm(x, weights[1], EPS), *rotation)
        assert mine.dtype == dtype
        np.testing.assert_allclose(np.asarray(mine, np.float64), exactly(x, weights[1], rotation), atol=0.06)
        last_bit = 2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(mine, rounded, rtol=last_bit, atol=last_bit)


def test_other_devices():
    q, norms = normal(2, 4, 128), normal(1, 128)
    with pytest.raises(NotImplementedError, match="Hopper only"):
        head_norm(q, q, (norms, norms), 0, angles(2, 64), eps=EPS)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "match"),
    [
        (jnp.float32, (8, 4), 128, "bfloat16 or float16, not float32"),
        (jnp.bfloat16, (8, 2), 128, r"multiples of 4 heads, not \[8, 2\]"),
        (jnp.bfloat16, (8, 4), 96, "multiples of 64 dimensions, not of 96"),
    ],
)
def test_what_the_kernel_cannot_take(monkeypatch: pytest.MonkeyPatch, dtype, heads, head_dim, match):
    monkeypatch.setattr(api, "target", lambda: Target(True, 9.0))
    with pytest.raises(NotImplementedError, match=match):
        check_head_norm(jnp.dtype(dtype), heads, head_dim)
