"""Products of many rows with matrices in few bits compiled for an H200, without one."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jdllm.compiling.executables import temp_bytes
from jdllm.pallas.quantised_matmul.mosaic_gpu import quantised_matmul_mosaic_gpu
from jdllm.pallas.quantised_matmul.tiles import Tiles
from jdllm.planning.aot import compile_for
from jdllm.quantised import KINDS, Quantised, WeightForm
from tests.few_bits import shape_of

pytestmark = pytest.mark.aot

LAYERS, ROWS, HIDDEN = 4, 512, 4096


MULTIPLIED = {"int8": 0, "int4": 16, "uint4": 16}
"""Fused multiplications of the weights that a warp has in a step, two at a time.

PTX is read, since jaxlib prints machine code only where CUDA's disassembler is installed.
"""


@pytest.mark.parametrize("form", MULTIPLIED)
@pytest.mark.parametrize("cut", [(256, 2, 2), (192, 2, 1), (128, 2, 2), (64, 1, 1)])
def test_the_kernel_keeps_to_registers_and_reads_the_stack_in_place(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    cut: tuple[int, int, int],
    form: WeightForm,
):
    for what in ("PTXAS", "PTX"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
    tiles = Tiles(*cut, bits=KINDS[form].bits, shifted=form == "uint4")

    def layers(x: jax.Array, stack: Quantised) -> jax.Array:
        def body(layer: jax.Array, x: jax.Array) -> jax.Array:
            return quantised_matmul_mosaic_gpu(x, stack, layer=layer, tiles=tiles)

        return lax.fori_loop(0, LAYERS, body, x)

    x = jax.ShapeDtypeStruct((ROWS, HIDDEN), jnp.bfloat16)
    executable = compile_for("h200", layers, x, shape_of(form, (LAYERS, HIDDEN, HIDDEN)))
    assert temp_bytes(executable) < 4 * ROWS * HIDDEN * 2  # rows, but no matrix
    printed = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", printed) == [("0", "0")], printed
    assert printed.count("fma.rn.bf16x2") == MULTIPLIED[form]
    assert printed.count("ldmatrix.sync") == (form == "uint4")
