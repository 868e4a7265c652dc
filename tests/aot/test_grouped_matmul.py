"""LLaDA-MoE's grouped products compiled for an H200, without one."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jdllm.compiling.executables import temp_bytes
from jdllm.models.config import MoeConfig
from jdllm.models.moe import Experts, moe_ffn
from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.pallas.grouped_matmul.few_bits_mosaic_gpu import grouped_matmul_few_bits_mosaic_gpu
from jdllm.pallas.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu
from jdllm.pallas.quantised_matmul.tiles import Tiles
from jdllm.planning.aot import compile_for
from jdllm.quantised import KINDS, WeightForm
from tests.few_bits import OF_EXPERTS

pytestmark = pytest.mark.aot

LAYERS, EXPERTS, TOP_K, HIDDEN, FFN = 3, 64, 8, 2048, 1024
MOE = MoeConfig(EXPERTS, TOP_K, FFN)
TOKENS = 1024
ROWS = TOP_K * TOKENS
ROWS_OF_KERNEL = ROWS + 128
"""As many as in no other test of the lane: a kernel that the process has compiled already prints nothing."""


def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(("k", "n", "gated"), [(HIDDEN, FFN, True), (FFN, HIDDEN, False)])
def test_the_kernel_keeps_to_registers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], k: int, n: int, gated: bool
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    weights = shape(LAYERS * EXPERTS, k, n)
    gates = (weights,) if gated else ()
    sizes = shape(EXPERTS, dtype=jnp.int32)
    executable = compile_for(
        "h200",
        lambda x, weights, sizes, *gate: grouped_matmul_mosaic_gpu(x, weights, sizes, EXPERTS, *gate),
        shape(ROWS_OF_KERNEL, k),
        weights,
        sizes,
        *gates,
    )
    printed = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", printed) == [("0", "0")], printed
    assert temp_bytes(executable) < 64 * 1024  # the units of rows


@pytest.mark.parametrize("form", OF_EXPERTS)
@pytest.mark.parametrize(
    ("cut", "gated"), [((256, 2, 2), False), ((64, 1, 1), False), ((128, 2, 2), True), ((64, 2, 1), True)]
)
def test_the_kernel_for_few_bits_keeps_to_registers(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    cut: tuple[int, int, int],
    gated: bool,
    form: WeightForm,
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    k, n = (HIDDEN, FFN) if gated else (FFN, HIDDEN)
    weights = jax.eval_shape(KINDS[form].of, shape(LAYERS * EXPERTS, n, k))
    tiles = Tiles(*cut, bits=weights.bits, matrices=1 + gated)
    executable = compile_for(
        "h200",
        lambda x, weights, sizes, gate: grouped_matmul_few_bits_mosaic_gpu(
            x, weights, sizes, EXPERTS, gate, tiles=tiles
        ),
        *(shape(ROWS, k), weights, shape(EXPERTS, dtype=jnp.int32), weights if gated else None),
    )
    printed = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", printed) == [("0", "0")], printed
    assert temp_bytes(executable) < 64 * 1024  # the units of rows


def layers(x, routers, gate, up, down):
    def layer(x, at):
        place, router = at
        experts = Experts(gate, up, down, 0, EXPERTS).of_layer(place)
        return x + moe_ffn(x, router, None, experts, MOE, grouped_matmul), None

    return lax.scan(layer, x, (jnp.arange(LAYERS), routers))[0]


@pytest.mark.parametrize("form", OF_EXPERTS)
def test_a_layer_in_few_bits_has_no_wide_matrix(form: WeightForm):
    narrow, wide = (
        jax.eval_shape(KINDS[form].of, shape(LAYERS * EXPERTS, *s)) for s in ((FFN, HIDDEN), (HIDDEN, FFN))
    )
    executable = compile_for(
        "h200", layers, shape(TOKENS, HIDDEN), shape(LAYERS, EXPERTS, HIDDEN), narrow, narrow, wide
    )
    assert (executable.as_text() or "").count('custom_call_target="mosaic_gpu_v2"') == 2
    assert temp_bytes(executable) < 2 * ROWS * (HIDDEN + FFN) + 2**20


def test_a_layer_keeps_one_array_of_wide_rows_and_one_of_narrow_ones():
    """In a scan over layers: no copy of weights, and neither gates nor what they multiply."""
    wide, narrow = (shape(LAYERS * EXPERTS, *s) for s in ((FFN, HIDDEN), (HIDDEN, FFN)))
    executable = compile_for(
        "h200", layers, shape(TOKENS, HIDDEN), shape(LAYERS, EXPERTS, HIDDEN), narrow, narrow, wide
    )
    text = executable.as_text() or ""
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 2
    # Groups are counted by comparison: these would be several kernels each.
    assert "cumsum" not in text
    assert "scatter-add" not in text
    activations = 2 * ROWS * (HIDDEN + FFN)
    assert temp_bytes(executable) < activations + 2**20
