"""The kernels of single rows in interpret mode, against the primitives of the transformer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdllm.models.layers import rms_norm
from jdllm.models.rotary import rotate
from jdllm.pallas.device import Target
from jdllm.pallas.rowwise import add_norm, api, check_rowwise, rotate_rows
from jdllm.pallas.rowwise.kernel import add_norm_rows, rotated_rows

EPS = 1e-5


@pytest.fixture
def interpreted(capsys: pytest.CaptureFixture[str]):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert "RACE" not in capsys.readouterr().out


def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), dtype)


@pytest.mark.usefixtures("interpreted")
class TestKernels:
    @pytest.mark.parametrize("parts", [1, 3])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_the_sum_is_rounded_like_a_product_and_normed(self, parts: int, dtype):
        h, norms = normal(5, 512, dtype=dtype), normal(3, 512, dtype=dtype)
        added = normal(parts, 5, 512, dtype=jnp.float32)
        total, normed = add_norm_rows(h, added, norms, jnp.int32(1), eps=EPS, chained=True)
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

    @pytest.mark.parametrize(("heads", "kv_heads", "pairs"), [(4, 4, 64), (8, 4, 32)])
    def test_rotation(self, heads: int, kv_heads: int, pairs: int):
        q, k = normal(6, heads, 2 * pairs), normal(6, kv_heads, 2 * pairs)
        angles = jnp.asarray(np.random.default_rng(0).uniform(0, 6, (6, pairs)), jnp.float32)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        for turned, x in zip(rotated_rows(q, k, cos, sin, chained=True), (q, k), strict=True):
            np.testing.assert_allclose(
                np.asarray(turned, np.float32),
                np.asarray(rotate(x, cos, sin), np.float32),
                rtol=1e-2,
                atol=1e-6,
            )


class TestLimits:
    def test_other_devices(self):
        with pytest.raises(NotImplementedError, match="Hopper only"):
            add_norm(normal(2, 512), normal(1, 2, 512, dtype=jnp.float32), normal(1, 512), 0, eps=EPS)

    @pytest.mark.parametrize(
        ("dtype", "columns", "heads", "pairs", "match"),
        [
            (jnp.float32, 512, (4, 4), 64, "bfloat16 or float16"),
            (jnp.bfloat16, 640, (4, 4), 64, "multiples of 512 columns, not 640"),
            (jnp.bfloat16, 512, (4, 2), 64, "multiples of 4 heads"),
            (jnp.bfloat16, 512, (4, 4), 40, "of 32 pairs"),
        ],
    )
    def test_what_the_kernels_cannot_take(self, monkeypatch, dtype, columns, heads, pairs, match):
        monkeypatch.setattr(api, "target", lambda: Target(True, 9.0))
        with pytest.raises(NotImplementedError, match=match):
            check_rowwise(dtype, columns, heads, pairs)

    def test_a_part_of_each_head(self, monkeypatch):
        monkeypatch.setattr(api, "target", lambda: Target(True, 9.0))
        q, cos = normal(2, 4, 128), normal(2, 32, dtype=jnp.float32)
        with pytest.raises(NotImplementedError, match="whole heads, not 64 of 128"):
            rotate_rows(q, q, cos, cos)
