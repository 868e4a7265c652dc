"""The head in Triton compiled for cards that are not there."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdllm.compiling.executables import temp_bytes
from jdllm.pallas import triton_launch
from jdllm.pallas.device import Target
from jdllm.pallas.masked_logits import Level, RowPenalty, RowSampling, masked_logits
from jdllm.pallas.masked_logits.limits import PARTIAL_BYTES
from jdllm.planning.aot import compile_for
from tests.aot.triton_kernels import check_kernel

pytestmark = pytest.mark.aot

VOCAB, DEPTH = 126_464, 4096
CASES = [
    *(
        (rows, level, jnp.bfloat16, False)
        for rows in (16, 32, 64, 4096)
        for level in (Level.TOP, Level.MOMENTS)
    ),
    *((rows, Level.TOP, jnp.bfloat16, True) for rows in (16, 64)),
    (32, Level.TOP, jnp.float16, False),
    (32, Level.MOMENTS, jnp.float32, False),
    (4096, Level.MOMENTS, jnp.float32, False),
]
"""Rows, level, type, and whether rows have penalties."""

MOST_SPILLED = 448
"""Bytes of a thread, once for each tile of many rows on cards with room for 128 ids in it: logits, noise and
ids do not all fit into registers, of which the product takes a quarter."""

MOST_SPILLED_F32 = 1200
"""Likewise: without tensor cores larger tiles are faster all the same."""


def operands(rows: int, dtype, penalised: bool = False) -> tuple[Any, Any, RowSampling]:
    i, u, f, b = (jax.ShapeDtypeStruct((rows,), t) for t in (jnp.int32, jnp.uint32, jnp.float32, jnp.bool_))
    bans = jax.ShapeDtypeStruct((rows, 2), jnp.int32)
    hidden, head = (jax.ShapeDtypeStruct((n, DEPTH), dtype) for n in (rows, VOCAB))
    occurrences = jax.ShapeDtypeStruct((rows, VOCAB), jnp.int32)
    penalty = RowPenalty._make((occurrences, i, f, f, f)) if penalised else None
    return (
        hidden,
        head,
        RowSampling._make(((u, u), i, f, b, i, f, f, b, i, bans, bans, b, penalty, None, None, None)),
    )


@pytest.mark.parametrize("capability", [8.0, 8.6, 8.9, 9.0, 10.0, 12.0])
def test_it_fits_the_card(kernels: list[Any], monkeypatch: pytest.MonkeyPatch, capability: float):
    # Not before: a process that has imported Triton cannot interpret its kernels any more.
    form = importlib.import_module("jdllm.pallas.masked_logits.triton")
    for module in (triton_launch, form):
        monkeypatch.setattr(module, "target", lambda: Target(True, capability))
    for rows, level, dtype, penalised in CASES:
        decide = functools.partial(form.masked_logits_triton, level=level)
        jax.jit(decide).trace(*operands(rows, dtype, penalised)).lower(lowering_platforms=("cuda",))
        is_large = rows > 64 and triton_launch.shared_kib(capability) >= 227
        spilled = MOST_SPILLED_F32 if dtype == jnp.float32 else MOST_SPILLED if is_large else 16
        check_kernel(kernels[-1], capability, spilled)
    assert len(kernels) == len(CASES)


@pytest.mark.parametrize("rows", [32, 4096])
def test_no_logits_are_held(rows: int):
    decide = functools.partial(masked_logits, level=Level.MOMENTS, implementation="triton")
    executable = compile_for("a100-80gb", decide, *operands(rows, jnp.bfloat16))
    assert temp_bytes(executable) <= PARTIAL_BYTES + (1 << 20)
