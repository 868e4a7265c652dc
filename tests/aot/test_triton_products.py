"""Triton's products compiled for cards that are not there: experts of LLaDA-MoE, a few rows of LLaDA-8B."""

import functools
import importlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdllm.compiling.executables import temp_bytes
from jdllm.pallas import triton_launch
from jdllm.pallas.device import Target
from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.pallas.skinny_matmul import skinny_matmul
from jdllm.planning.aot import compile_for
from jdllm.quantised import KINDS, WeightForm
from tests.aot.triton_kernels import KIB, check_kernel
from tests.few_bits import shape_of

pytestmark = pytest.mark.aot

CAPABILITIES = (8.0, 8.6, 8.9, 9.0, 10.0, 12.0)
LAYERS, EXPERTS = 2, 64
GROUPED = [
    *((gated, rows, jnp.bfloat16) for gated in (False, True) for rows in (256, 32768)),
    (True, 32768, jnp.float16),
    *((gated, 32768, jnp.float32) for gated in (False, True)),
]
"""Whether a product is gated, rows of all experts, and the type."""

OUTPUTS = {"qkv": ((4096, 4096, 4096), 4096), "gated": ((12288, 12288), 4096), "down": ((4096,), 12288)}
FEW = [
    *((product, 32, jnp.bfloat16) for product in OUTPUTS),
    *(("gated", rows, jnp.bfloat16) for rows in (1, 64)),
    ("qkv", 64, jnp.bfloat16),
    ("gated", 32, jnp.float16),
    *(("gated", rows, jnp.float32) for rows in (16, 32, 64)),
]

FEW_BITS: list[tuple[WeightForm, int, Any]] = [
    *((bits, rows, jnp.bfloat16) for bits in ("int8", "int4", "uint4") for rows in (16, 32, 64, 512)),
    *((bits, 512, jnp.float16) for bits in ("int4", "uint4")),
    *((bits, rows, jnp.float32) for bits in ("int8", "int4", "uint4") for rows in (16, 512)),
]
"""Bits of weights, rows, and the type of the rows."""


def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def form_for(
    operator: str, monkeypatch: pytest.MonkeyPatch, capability: float, module: str = "triton"
) -> Any:
    """The module of a form, for a card of this capability."""
    # Not before: a process that has imported Triton cannot interpret its kernels any more.
    launching = importlib.import_module(f"jdllm.pallas.{operator}.triton")
    for asking in (triton_launch, launching):
        monkeypatch.setattr(asking, "target", lambda: Target(True, capability))
    return importlib.import_module(f"jdllm.pallas.{operator}.{module}")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_grouped_products_fit_the_card(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch, capability: float
):
    form = form_for("grouped_matmul", monkeypatch, capability)
    for gated, rows, dtype in GROUPED:
        k, n = (2048, 1024) if gated else (1024, 2048)
        weights = shape(LAYERS * EXPERTS, k, n, dtype=dtype)
        gates = {"gate": weights} if gated else {}
        multiply = functools.partial(form.grouped_matmul_triton)  # JAX would keep the traces of one
        x, sizes, first = shape(rows, k, dtype=dtype), shape(EXPERTS, dtype=jnp.int32), shape(dtype=jnp.int32)
        traced = jax.jit(multiply).trace(x, weights, sizes, first, **gates)
        traced.lower(lowering_platforms=("cuda",))
        check_kernel(kernels[-1], capability)
    assert len(kernels) == len(GROUPED)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_grouped_products_with_few_bits_fit_the_card(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch, capability: float
):
    form = form_for("grouped_matmul", monkeypatch, capability, "few_bits_triton")
    for (gated, rows, dtype), bits in itertools.product(GROUPED, ("int8", "int4")):
        k, n = (2048, 1024) if gated else (1024, 2048)
        weights = jax.eval_shape(KINDS[bits].of, shape(LAYERS * EXPERTS, n, k))
        gates = {"gate": weights} if gated else {}
        multiply = functools.partial(form.grouped_matmul_few_bits_triton)
        x, sizes, first = shape(rows, k, dtype=dtype), shape(EXPERTS, dtype=jnp.int32), shape(dtype=jnp.int32)
        traced = jax.jit(multiply).trace(x, weights, sizes, first, **gates)
        traced.lower(lowering_platforms=("cuda",))
        check_kernel(kernels[-1], capability)
    assert len(kernels) == 2 * len(GROUPED)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_of_few_rows_fit_the_card(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch, capability: float
):
    form = form_for("skinny_matmul", monkeypatch, capability)
    for product, rows, dtype in FEW:
        outputs, k = OUTPUTS[product]
        multiply = functools.partial(form.skinny_matmul_triton, gated=product == "gated")
        stacks = [shape(LAYERS, n, k, dtype=dtype) for n in outputs]
        traced = jax.jit(multiply).trace(shape(rows, k, dtype=dtype), stacks, layer=shape(dtype=jnp.int32))
        traced.lower(lowering_platforms=("cuda",))
        check_kernel(kernels[-1], capability)
    assert len(kernels) == len(FEW)


def test_neither_copies_weights(kernels: list[Any]):
    """In a loop over layers, each of which reads its own from the stacks of all."""

    def layers(x: Any, experts: Any, sizes: Any, few: Any, stacks: Any) -> Any:
        def layer(place: Any, carry: Any) -> Any:
            x, few = carry
            inner = grouped_matmul(
                x, experts[0], sizes, first_group=place * EXPERTS, gate=experts[1], implementation="triton"
            )
            x = grouped_matmul(inner, experts[2], sizes, first_group=place * EXPERTS, implementation="triton")
            (y,) = skinny_matmul(few, stacks[:2], layer=place, gated=True, implementation="triton")
            (few,) = skinny_matmul(y, stacks[2:], layer=place, implementation="triton")
            return x, few

        return jax.lax.fori_loop(0, LAYERS, layer, (x, few))

    narrow, wide = shape(LAYERS * EXPERTS, 2048, 1024), shape(LAYERS * EXPERTS, 1024, 2048)
    stacks = [shape(LAYERS, 12288, 4096)] * 2 + [shape(LAYERS, 4096, 12288)]
    executable = compile_for(
        "a100-80gb",
        layers,
        *(shape(8192, 2048), (narrow, narrow, wide), shape(EXPERTS, dtype=jnp.int32)),
        *(shape(32, 4096), stacks),
    )
    assert (executable.as_text() or "").count('custom_call_target="triton_kernel_call"') == len(kernels) == 4
    rows = 2 * 8192 * (2 * 2048 + 1024)  # those that a layer takes, leaves and keeps between
    assert temp_bytes(executable) < rows + 8 * KIB * KIB


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_with_few_bits_fit_the_card(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch, capability: float
):
    form = form_for("quantised_matmul", monkeypatch, capability)
    for bits, rows, dtype in FEW_BITS:
        multiply = functools.partial(form.quantised_matmul_triton)
        stack = shape_of(bits, (LAYERS, 12288, 4096))
        traced = jax.jit(multiply).trace(shape(rows, 4096, dtype=dtype), stack, layer=shape(dtype=jnp.int32))
        traced.lower(lowering_platforms=("cuda",))
        check_kernel(kernels[-1], capability)
    assert len(kernels) == len(FEW_BITS)
