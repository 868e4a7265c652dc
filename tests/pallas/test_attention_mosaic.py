"""The Hopper attention kernel against float64, in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdllm.pallas.attention import AttentionOutput, attention
from jdllm.pallas.attention.kernel import Tiles
from jdllm.pallas.attention.mosaic_gpu import attention_mosaic_gpu
from jdllm.pallas.products import Interpreted
from tests.pallas.test_attention import Inputs, inputs, oracle

HEAD_DIM = 64
SCALE = 0.3
SMALL = Tiles(keys=64, stages=2)


@pytest.fixture(autouse=True)
def interpreted(capsys: pytest.CaptureFixture[str]):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert "RACE" not in capsys.readouterr().out


def rounded(rows: int, keys: int, heads: int = 1, kv_heads: int = 1, dtype=jnp.bfloat16) -> Inputs:
    return Inputs(*(np.asarray(jnp.asarray(a, dtype)) for a in inputs(rows, keys, heads, kv_heads, HEAD_DIM)))


def attend(x: Inputs, start: np.ndarray, end: np.ndarray, tiles: Tiles = SMALL) -> AttentionOutput:
    run = functools.partial(attention_mosaic_gpu, scale=SCALE, tiles=tiles, products=Interpreted)
    q, k, v = map(jnp.asarray, x)
    return run(q, k, v, start, end)


def check(x: Inputs, start: np.ndarray, end: np.ndarray, tiles: Tiles = SMALL) -> None:
    actual, expected = attend(x, start, end, tiles), oracle(x, start, end, SCALE)
    assert actual.o.dtype == x.q.dtype
    np.testing.assert_allclose(actual.m, expected.m, rtol=1e-5)
    np.testing.assert_allclose(actual.l, expected.l, rtol=1e-5)
    # probabilities and output are each rounded
    bound = float(jnp.finfo(x.q.dtype).eps) * np.abs(np.asarray(x.v, np.float64)).max()
    np.testing.assert_allclose(np.asarray(actual.o, np.float64), expected.o, atol=bound)


def full(rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(rows, np.int32), np.full(rows, keys, np.int32)


@pytest.mark.slow
def test_several_clusters_heads_and_blocks_of_keys_that_end_anywhere():
    check(rounded(300, 203, heads=2), *full(300, 203))


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [Tiles(64, 3), Tiles(128, 2)])
def test_other_cuts(tiles: Tiles):
    check(rounded(20, 500), *full(20, 500), tiles)


@pytest.mark.slow
def test_query_heads_share_key_heads_in_order():
    check(rounded(10, 70, heads=6, kv_heads=2), *full(10, 70))


@pytest.mark.slow
def test_float16():
    check(rounded(10, 70, dtype=jnp.float16), *full(10, 70))


@pytest.mark.slow
def test_segments_that_begin_anywhere_and_rows_that_see_nothing():
    lengths, rows = [37, 90, 5, 140], 300
    ends = np.cumsum(lengths)
    start, end = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for a, b in zip(ends - lengths, ends, strict=True):
        start[a:b], end[a:b] = a, b
    end[50] = start[50]
    check(rounded(rows, rows), start, end)


@pytest.mark.slow
def test_causal_and_block_causal_ranges():
    rows = 200
    row = np.arange(rows)
    x = rounded(rows, rows)
    check(x, np.zeros(rows, np.int32), row + 1)
    check(x, np.zeros(rows, np.int32), np.minimum(row // 48 * 48 + 48, rows))


@pytest.mark.slow
def test_keys_outside_the_ranges_are_not_read_as_numbers():
    x = rounded(20, 200)
    start, end = np.full(20, 100, np.int32), np.full(20, 130, np.int32)
    spoilt = Inputs(x.q, *(a.copy() for a in x[1:]))
    spoilt.k[:90] = spoilt.k[150:] = spoilt.v[:90] = spoilt.v[150:] = 1e30
    for clean, other in zip(attend(x, start, end), attend(spoilt, start, end), strict=True):
        np.testing.assert_array_equal(clean, other)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "scale", "reason"),
    [
        (jnp.float32, 64, 1.0, "not float32"),
        (jnp.bfloat16, 96, 1.0, "not of 96"),
        (jnp.bfloat16, 64, 0.0, "above 0"),
    ],
)
def test_names_the_limit(dtype, head_dim: int, scale: float, reason: str):
    q = jnp.ones((4, 1, head_dim), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        attention_mosaic_gpu(q, q, q, *full(4, 4), scale=scale)


def test_is_refused_where_it_cannot_run():
    assert jax.default_backend() == "cpu"
    q = jnp.ones((4, 1, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="Hopper only"):
        attention(q, q, q, *full(4, 4), scale=1.0, implementation="mosaic_gpu")
