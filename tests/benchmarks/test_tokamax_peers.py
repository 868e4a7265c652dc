"""The adapters of tokamax ask it for what our operators compute. A stand-in multiplies: it needs a card."""

import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.peers.tokamax_operators import attention_tokamax, grouped_matmul_tokamax
from jdllm.pallas.attention import attention
from jdllm.pallas.grouped_matmul import grouped_matmul

SIZES = np.array([0, 29, 0, 9, 1], np.int32)
SCALE = 0.3


class Mask(NamedTuple):
    k_start: jax.Array
    k_end: jax.Array


class FlashAttention:
    """Dense attention of whole tiles that gives residuals by head, as tokamax does."""

    def __call__(self, q: Any, k: Any, v: Any, *, logits_scale: float, mask: Mask, return_residuals: bool):
        assert return_residuals
        assert len(q) % 128 == 0
        out = attention(q, k, v, *mask, scale=logits_scale, implementation="reference")
        return out.o, (out.m.T, out.l.T)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, np.ndarray]]:
    """Stands in for tokamax and notes the implementation and the sizes of each grouped product."""
    noted = []

    def ragged_dot(lhs, rhs, group_sizes, *, implementation, preferred_element_type):
        noted.append((implementation, np.asarray(group_sizes)))
        out = grouped_matmul(lhs, rhs, group_sizes, implementation="reference")
        return out.astype(preferred_element_type)

    where = "tokamax._src.ops.attention"
    contents = {
        "tokamax": {"ragged_dot": ragged_dot},
        f"{where}.base": {"Mask": Mask},
        f"{where}.pallas_mosaic_gpu": {"PallasMosaicGpuFlashAttention": FlashAttention},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return noted


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("tokamax.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tokamax", None)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape[0]).standard_normal(shape), jnp.bfloat16)


def test_groups_of_other_layers_are_empty_ones(asked):
    x, weights, gate = normal(39, 24), normal(8, 24, 40), normal(8, 24, 40)
    for given in (None, gate):
        actual = grouped_matmul_tokamax(x, weights, SIZES, first_group=jnp.int32(2), gate=given)
        expected = grouped_matmul(x, weights, SIZES, first_group=2, gate=given, implementation="reference")
        np.testing.assert_array_equal(actual, expected)
    assert len(asked) == 3
    for implementation, sizes in asked:
        assert implementation == "mosaic"
        np.testing.assert_array_equal(sizes, [0, 0, *SIZES, 0])


@pytest.mark.usefixtures("asked")
@pytest.mark.slow
@pytest.mark.parametrize("rows", [128, 150])
def test_attention_of_any_number_of_rows(rows: int):
    q, k, v = normal(rows, 4, 16), normal(rows + 1, 2, 16), normal(rows + 1, 2, 16)
    start = np.arange(rows, dtype=np.int32) // 50 * 50
    end = np.minimum(start + 40, rows)
    actual = attention_tokamax(q, k, v, start, end, scale=SCALE)
    expected = attention(q, k, v, start, end, scale=SCALE, implementation="reference")
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("missing")
def test_without_tokamax_both_say_so():
    with pytest.raises(NotImplementedError, match="extra 'bench'"):
        grouped_matmul_tokamax(normal(39, 24), normal(8, 24, 40), SIZES, 0)
    x, bounds = normal(3, 4, 16), np.zeros(3, np.int32)
    with pytest.raises(NotImplementedError, match="extra 'bench'"):
        attention_tokamax(x, x, x, bounds, bounds, scale=SCALE)
