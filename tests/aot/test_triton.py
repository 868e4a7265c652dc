"""Triton's kernels compiled for cards that are not there: Ampere to Blackwell."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.operators import triton_compiled
from jdllm.compiling.executables import temp_bytes
from jdllm.pallas import triton_launch
from jdllm.pallas.attention import attention
from jdllm.pallas.device import Target
from jdllm.pallas.split_attention import PageTable
from jdllm.pallas.split_attention.limits import ADA
from jdllm.planning.aot import capability_of, compile_for
from jdllm.quantised import FLOAT8
from jdllm.stored_rows import Float8Rows
from tests.aot.triton_kernels import KIB, check_kernel

pytestmark = pytest.mark.aot

ROWS, KEYS, HEADS, KV_HEADS = 1000, 3001, 32, 8
HEAD_DIMS = (64, 96, 128, 256)


def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def operands(head_dim: int, dtype=jnp.bfloat16, rows: int = ROWS) -> tuple[jax.ShapeDtypeStruct, ...]:
    keys, bounds = shape(KEYS, KV_HEADS, head_dim, dtype=dtype), shape(rows, dtype=jnp.int32)
    return shape(rows, HEADS, head_dim, dtype=dtype), keys, keys, bounds, bounds


CASES = [
    operands(128, jnp.float16),
    *(operands(d, t) for t in (jnp.bfloat16, jnp.float32) for d in HEAD_DIMS),
]


def attend_all(cases: Any, implementation: Any) -> list[Any]:
    return [attention(*case, scale=0.1, implementation=implementation) for case in cases]


@pytest.mark.parametrize("target", ["a100-80gb", "rtx3090", "l40s", "h200", "b200", "rtx5090"])
def test_attention_fits_the_card(kernels: list[Any], target: str):
    attend = functools.partial(attend_all, implementation="triton")
    executable = compile_for(target, attend, CASES)
    major, minor = capability_of(target)
    spilling = [(128, 2)] if major == 9 else []  # blocks of 128 keys, which are faster all the same
    for kernel, (q, *_) in zip(kernels, CASES, strict=True):
        spills = (q.shape[2], q.dtype.itemsize) in [(256, 4), *spilling]
        check_kernel(kernel, major + minor / 10, 48 if spills else 0)
    text = executable.as_text() or ""
    assert text.count('custom_call_target="triton_kernel_call"') == len(kernels) == len(CASES)
    # The kernels take any number of rows and keys as they are.
    assert " pad(" not in text
    assert temp_bytes(executable) < 64 * KIB


SPLIT_CASES = [
    (32, 32, 128, jnp.bfloat16),
    (8, 1, 128, jnp.bfloat16),
    (4, 32, 64, jnp.float16),
    (8, 32, 256, jnp.bfloat16),
    (8, 8, 64, jnp.float32),
    (8, 8, 128, jnp.float32),
    (8, 8, 256, jnp.float32),
]
"""Key-value heads, queries, head size and type of Split-S attention of 32 heads over pages of 64 rows."""


@pytest.mark.parametrize("capability", [8.0, 8.6, 8.9, 9.0, 10.0, 12.0])
def test_split_attention_fits_the_card(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch, capability: float
):
    # Not before: a process that has imported Triton cannot interpret its kernels any more.
    form = importlib.import_module("jdllm.pallas.split_attention.triton")
    for module in (triton_launch, form):
        monkeypatch.setattr(module, "target", lambda: Target(True, capability))
    for kv_heads, queries, head_dim, dtype in SPLIT_CASES:
        pool = shape(2, 100, kv_heads, 64, head_dim, dtype=dtype)
        table = PageTable._make(shape(n, dtype=jnp.int32) for n in (64, 64, 3))
        fresh = shape(64, kv_heads, head_dim, dtype=dtype)
        q = shape(2, queries, HEADS, head_dim, dtype=dtype)
        attend = functools.partial(form.split_attention_triton, layer=1, scale=0.1)
        parts: Any = shape(*pool.shape, dtype=FLOAT8), shape(*pool.shape[:-1])
        in_8_bits = Float8Rows(*parts)
        for keys in (pool, in_8_bits) if capability >= ADA else (pool,):
            traced = jax.jit(attend).trace(q, keys, keys, table, fresh=(fresh, fresh))
            traced.lower(lowering_platforms=("cuda",))
            of_large_heads = 8 if head_dim == 256 and keys is in_8_bits else 0
            check_kernel(kernels[-1], capability, 16 if dtype == jnp.float32 else of_large_heads)
    assert len(kernels) == len(SPLIT_CASES) * (2 if capability >= ADA else 1)


def test_the_table_of_a_card():
    rows = list(triton_compiled.measure("rtx4090"))
    assert [row["kernel"] for row in rows] == list(triton_compiled.CASES)
    for row in rows:
        assert (row["capability"], row["of_kib"], row["spilled"]) == (8.9, 99, 0)
        assert 0 < row["registers"] <= 255
        assert 0 < row["shared_kib"] <= 99


def test_a_kernel_is_compiled_once_whatever_the_number_of_rows(kernels: list[Any]):
    attend = functools.partial(attend_all, implementation="triton")
    compile_for("a100-80gb", attend, [operands(64, rows=rows) for rows in (64, 500, 4096)])
    assert len(kernels) == 1
