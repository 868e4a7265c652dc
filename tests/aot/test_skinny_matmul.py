"""LLaDA-8B's products of a few rows compiled for an H200, without one."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jdllm.compiling.executables import temp_bytes
from jdllm.pallas.skinny_matmul import skinny_matmul
from jdllm.planning.aot import compile_for
from jdllm.quantised import KINDS, WeightForm
from tests.few_bits import shape_of

pytestmark = pytest.mark.aot

LAYERS, HIDDEN, FFN = 4, 4096, 12288


@pytest.mark.parametrize("form", [None, *KINDS])
@pytest.mark.parametrize(
    ("rows", "n", "k", "weights", "gated"),
    [
        (32, FFN, HIDDEN, 2, True),
        (64, FFN, HIDDEN, 2, True),
        (32, HIDDEN, FFN, 1, False),
        (32, 256, 256, 3, False),  # shared memory has room for any number of stages
    ],
    ids=["gate_up", "gate_up of 64 rows", "down", "narrow"],
)
def test_the_kernel_keeps_to_registers_and_reads_the_stacks_in_place(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    rows: int,
    n: int,
    k: int,
    weights: int,
    gated: bool,
    form: WeightForm | None,
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def layers(x: jax.Array, stacks: Sequence[Any]) -> jax.Array:
        def body(layer: jax.Array, last: jax.Array) -> jax.Array:
            again, _ = lax.optimization_barrier((x, last))
            products = skinny_matmul(again, stacks, layer=layer, gated=gated, implementation="mosaic_gpu")
            return jnp.concatenate(products, axis=1)

        return lax.fori_loop(0, LAYERS, body, jnp.zeros((rows, n if gated else weights * n), x.dtype))

    x, stack = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, k), (LAYERS, n, k)))
    stack = shape_of(form, stack.shape) if form else stack
    executable = compile_for("h200", layers, x, [stack] * weights)
    assert (executable.as_text() or "").count('custom_call_target="mosaic_gpu_v2"') == 1
    assert temp_bytes(executable) < 4 * 2**20  # partial sums and results, but no matrix
    printed = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", printed) == [("0", "0")], printed
