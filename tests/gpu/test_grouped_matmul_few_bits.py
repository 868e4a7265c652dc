"""Grouped products in few bits at shapes of LLaDA-MoE against f32, on a card: forms of Hopper and Triton."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.pallas.grouped_matmul.few_bits_mosaic_gpu import grouped_matmul_few_bits_mosaic_gpu
from jdllm.pallas.quantised_matmul.tiles import BLOCK_ROWS, CLUSTERS, CONSUMERS, Tiles
from jdllm.quantised import KINDS, Quantised, WeightForm
from tests.few_bits import OF_EXPERTS
from tests.gpu.test_grouped_matmul import (
    FIRST,
    ROUNDING,
    SIDES,
    balanced,
    check,
    draw,
    exact,
    rounded,
    skewed,
)

pytestmark = pytest.mark.gpu

mosaic_gpu = jax.jit(functools.partial(grouped_matmul, first_group=FIRST, implementation="mosaic_gpu"))


@pytest.fixture(params=OF_EXPERTS)
def form(request: pytest.FixtureRequest) -> WeightForm:
    return request.param


@functools.partial(jax.jit, static_argnames=("form", "rounds"))
def kept(matrices: jax.Array, form: WeightForm, rounds: bool = True) -> tuple[Quantised, jax.Array]:
    """Matrices `[inputs, outputs]` in few bits, and what they stand for: in 4 bits, where a kernel `rounds`
    what it multiplies, rounded to bfloat16."""
    few = KINDS[form].of(matrices.mT)
    wide = few.dequantised(jnp.dtype(jnp.bfloat16 if form == "int4" and rounds else jnp.float32))
    return few, wide.mT.astype(jnp.float32)


@pytest.mark.parametrize(("k", "n"), SIDES)
@pytest.mark.parametrize(
    "sizes", [balanced(256), skewed(8192), balanced(32768)], ids=lambda s: f"{s.sum()}-{s[17]}"
)
def test_products(sizes: np.ndarray, k: int, n: int, form: WeightForm):
    x, weights, _ = draw(int(sizes.sum()), k, n)
    few, wide = kept(weights, form)
    check(mosaic_gpu(x, few, jnp.asarray(sizes)), exact(x, wide, sizes))


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [256, 8192])
def test_triton(rows: int, gated: bool, bits: WeightForm):
    sizes = skewed(rows)
    x, weights, gate = draw(rows, *SIDES[0])
    (few, wide), (few_gate, wide_gate) = (kept(some, bits, rounds=False) for some in (weights, gate))
    run = jax.jit(functools.partial(grouped_matmul, first_group=FIRST, implementation="triton"))
    actual = run(x, few, jnp.asarray(sizes), gate=few_gate if gated else None)
    up = exact(x, wide, sizes)
    if not gated:
        check(actual, up)
        return
    gates = rounded(exact(x, wide_gate, sizes))
    check(actual, rounded(gates / (1 + np.exp(-gates))) * rounded(up), 8 * ROUNDING)


def test_gated_products(form: WeightForm):
    sizes = skewed(8192)
    x, weights, gate = draw(8192, *SIDES[0])
    (few, wide), (few_gate, wide_gate) = kept(weights, form), kept(gate, form)
    gates, up = (rounded(exact(x, matrices, sizes)) for matrices in (wide_gate, wide))
    actual = mosaic_gpu(x, few, jnp.asarray(sizes), gate=few_gate)
    check(actual, rounded(gates / (1 + np.exp(-gates))) * up, 8 * ROUNDING)


@pytest.mark.parametrize("gated", [False, True])
def test_other_cuts_change_no_bit(gated: bool, form: WeightForm):
    sizes = jnp.asarray(skewed(8192))
    x, weights, gate = draw(8192, *SIDES[0])
    (few, _), (few_gate, _) = kept(weights, form), kept(gate, form)
    run = functools.partial(
        grouped_matmul_few_bits_mosaic_gpu, x, few, sizes, FIRST, few_gate if gated else None
    )
    default = np.asarray(run())
    rows = (128, 64) if gated else BLOCK_ROWS
    for cut in itertools.product(rows, CONSUMERS, CLUSTERS):
        np.testing.assert_array_equal(run(tiles=Tiles(*cut, few.bits, matrices=1 + gated)), default)


def test_many_calls_in_a_row_agree_bit_by_bit(form: WeightForm):
    sizes = jnp.asarray(skewed(8192))
    x, weights, gate = draw(8192, *SIDES[0])
    (few, _), (few_gate, _) = kept(weights, form), kept(gate, form)
    first = mosaic_gpu(x, few, sizes, gate=few_gate)
    for _ in range(50):
        np.testing.assert_array_equal(first, mosaic_gpu(x, few, sizes, gate=few_gate))
