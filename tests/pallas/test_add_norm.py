"""Addition and norm in one kernel, in interpret mode, against float64 and the transformer's primitives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.layers import rms_norm
from jdllm.pallas.add_norm import add_norm, api, check_add_norm
from jdllm.pallas.add_norm.mosaic_gpu import add_norm_mosaic_gpu
from jdllm.pallas.device import Target

EPS = 1e-5


def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), dtype)


@pytest.mark.usefixtures("interpreted")
class TestKernel:
    @pytest.mark.parametrize("parts", [1, 3])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_the_sum_is_rounded_like_a_product_and_normed(self, parts: int, dtype):
        h, norms = normal(5, 512, dtype=dtype), normal(3, 512, dtype=dtype)
        added = normal(parts, 5, 512, dtype=jnp.float32)
        total, normed = add_norm_mosaic_gpu(h, added, norms, jnp.int32(1), eps=EPS, chained=True)
        expected = h + added.sum(0).astype(dtype)
        np.testing.assert_array_equal(total, expected)
        exact = np.asarray(expected, np.float64)
        exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + EPS)
        tolerance = float(2 * jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            np.asarray(normed, np.float64),
            exact * np.asarray(norms[1], np.float64),
            rtol=tolerance,
            atol=1e-6,
        )
        np.testing.assert_allclose(normed, rms_norm(expected, norms[1], EPS), rtol=tolerance)


class TestLimits:
    def test_other_devices(self):
        with pytest.raises(NotImplementedError, match="Hopper only"):
            add_norm(normal(2, 512), normal(1, 2, 512, dtype=jnp.float32), normal(1, 512), 0, eps=EPS)

    @pytest.mark.parametrize(
        ("dtype", "columns", "match"),
        [
            (jnp.float32, 512, "bfloat16 or float16, not float32"),
            (jnp.bfloat16, 640, "multiples of 512 columns, not 640"),
        ],
    )
    def test_what_the_kernel_cannot_take(self, monkeypatch: pytest.MonkeyPatch, dtype, columns, match):
        monkeypatch.setattr(api, "target", lambda: Target(True, 9.0))
        with pytest.raises(NotImplementedError, match=match):
            check_add_norm(jnp.dtype(dtype), columns)
