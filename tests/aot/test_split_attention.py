"""The Split-S kernels compiled for an H200, without one."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.pallas.split_attention import PageTable, split_attention
from jdllm.planning.aot import compile_for
from jdllm.quantised import FLOAT8
from jdllm.stored_rows import Float8Rows
from tests.aot.chains import spills_of

pytestmark = pytest.mark.aot

LAYERS, PAGES, PAGE_ROWS, HEAD_DIM, REQUESTS, QUERIES = 4, 2048, 64, 128, 4, 32
MIB = 2**20


attention = functools.partial(split_attention, scale=0.1, implementation="mosaic_gpu")


def attend(q, k, v, fresh, table, layer):
    """A loop over layers that carries the pool, as a step does."""

    def body(index, carry):
        q, k, v = carry
        return attention(q, k, v, table, fresh=(fresh, fresh), layer=layer + index).o, k, v

    return jax.lax.fori_loop(0, 2, body, (q, k, v))[0]


def in_8_bits(shape: tuple[int, ...]) -> Any:
    """A pool of this shape."""
    parts: Any = jax.ShapeDtypeStruct(shape, FLOAT8), jax.ShapeDtypeStruct(shape[:-1], jnp.bfloat16)
    return Float8Rows(*parts)


@pytest.mark.parametrize("form", ["bfloat16", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (28, 4)])
def test_the_kernel_reads_the_pool_in_place(heads: int, kv_heads: int, form: str):
    shape = (LAYERS, PAGES, kv_heads, PAGE_ROWS, HEAD_DIM)
    pool = in_8_bits(shape) if form == "fp8" else jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    q = jax.ShapeDtypeStruct((REQUESTS, QUERIES, heads, HEAD_DIM), jnp.bfloat16)
    fresh = jax.ShapeDtypeStruct((REQUESTS * QUERIES, kv_heads, HEAD_DIM), jnp.bfloat16)
    table = PageTable(*(np.zeros(n, np.int32) for n in (PAGES, PAGES, REQUESTS + 1)))
    executable: Any = compile_for("h200", attend, q, pool, pool, fresh, table, np.int32(0))
    assert re.search(r"custom-call\(.*mosaic_gpu", executable.as_text())
    one_layer = PAGES * kv_heads * PAGE_ROWS * HEAD_DIM * pool.dtype.itemsize
    assert executable.memory_analysis().temp_size_in_bytes < min(one_layer, 32 * MIB)


def test_the_kernel_keeps_to_its_registers_with_a_query_of_each_request(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Of groups of one head to seven, as one executable."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    table = PageTable(*(np.zeros(n, np.int32) for n in (PAGES, PAGES, 8 + 1)))
    operands = []
    for group, head_dim in ((1, 64), (1, 128), (2, 128), (4, 64), (7, 128)):
        pool = jax.ShapeDtypeStruct((LAYERS, PAGES, 4, PAGE_ROWS, head_dim), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((8, 1, 4 * group, head_dim), jnp.bfloat16)
        operands.append((q, pool, pool, jax.ShapeDtypeStruct((8, 4, head_dim), jnp.bfloat16)))

    def attend_all(operands, table):
        return [
            attention(q, k, v, table, fresh=(fresh, fresh), fresh_unit=1).o for q, k, v, fresh in operands
        ]

    executable: Any = compile_for("h200", attend_all, operands, table)
    assert spills_of("".join(capfd.readouterr())) == {("0", "0")}
    kernels = re.findall(r"\w+\(.*mosaic_gpu", executable.as_text())
    assert len(kernels) == 2 * len(operands)
    assert " pad(" not in executable.as_text()


def test_the_kernel_keeps_to_its_registers_with_pools_in_8_bits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Of one block and of several, with fresh rows and without, as one executable."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    table = PageTable(*(np.zeros(n, np.int32) for n in (PAGES, PAGES, REQUESTS + 1)))
    operands = []
    for heads, queries, head_dim in ((4, 32, 64), (4, 32, 128), (28, 1, 128), (12, 32, 128), (28, 40, 128)):
        pool = in_8_bits((LAYERS, PAGES, 4, PAGE_ROWS, head_dim))
        q = jax.ShapeDtypeStruct((REQUESTS, queries, heads, head_dim), jnp.bfloat16)
        operands.append((q, pool, jax.ShapeDtypeStruct((REQUESTS * queries, 4, head_dim), jnp.bfloat16)))

    def attend_all(operands, table):
        return [
            attention(q, pool, pool, table, fresh=rows).o
            for q, pool, fresh in operands
            for rows in (None, (fresh, fresh))
        ]

    executable: Any = compile_for("h200", attend_all, operands, table)
    spills = spills_of("".join(capfd.readouterr()))
    assert len(re.findall(r"\w+\(.*mosaic_gpu", executable.as_text())) == 4 * len(operands)
    assert spills == {("0", "0")}
