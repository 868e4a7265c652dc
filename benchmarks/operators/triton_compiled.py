"""What Triton's kernels take of cards, which need not be here: registers, spilled bytes and shared memory.

Run as `python3 -m benchmarks triton_compiled [--targets a100-80gb rtx4090]`, with the extra `cuda13` and
without a card. Shapes are those of the published models, in bfloat16; `of_kib` is the shared memory that a
program may have.
"""

import contextlib
import functools
import importlib
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.cases import case_parser
from benchmarks.record import print_row, record
from benchmarks.shapes import SHAPES
from jdllm.pallas.attention import attention
from jdllm.pallas.grouped_matmul import grouped_matmul
from jdllm.pallas.masked_logits import Level, RowSampling, masked_logits
from jdllm.pallas.skinny_matmul import skinny_matmul
from jdllm.pallas.split_attention import PageTable, split_attention
from jdllm.pallas.triton_launch import shared_kib
from jdllm.planning.aot import device_of, target_sharding

LLADA, MOE = SHAPES["llada-8b"], SHAPES["llada-moe-7b"]
TARGETS = ("a100-80gb", "rtx3090", "l40s", "h100", "b200", "rtx5090")
"""One of each compute capability."""


Case = tuple[Callable[..., Any], tuple[Any, ...]]
"""An operator and its operands."""


class Taken(NamedTuple):
    """Of one kernel: registers of a thread, bytes of these that are spilled, bytes of shared memory."""

    architecture: str
    registers: int
    spilled: int
    shared: int


@contextlib.contextmanager
def compiled_kernels() -> Iterator[list[Any]]:
    """What Triton compiles inside, each kernel once: PTX (`binary`) and bytes of shared memory."""
    triton_lib = importlib.import_module("jax_triton.triton_lib")
    compiled, compile_kernel = [], triton_lib.compile_ttir_inplace

    def keep(*args: Any) -> Any:
        compiled.append(compile_kernel(*args))
        return compiled[-1]

    with (
        mock.patch.object(triton_lib, "compile_ttir_inplace", keep),
        mock.patch.object(triton_lib, "_COMPILED_KERNEL_CACHE", {}),
    ):
        yield compiled


def taken(kernel: Any) -> Taken:
    """What the assembler says of a kernel of `compiled_kernels`."""
    nvidia = importlib.import_module("nvidia").__path__
    (ptxas,) = (found for root in nvidia for found in Path(root).glob("*/bin/ptxas"))
    architecture = re.search(r"\.target (sm_\w+)", kernel.binary)
    assert architecture is not None
    command = [ptxas, "--verbose", "--gpu-name", architecture[1], "--output-file", "/dev/null", "-"]
    said = subprocess.run(command, input=kernel.binary, capture_output=True, text=True, check=True).stderr
    (registers,), (spilled,) = (
        set(re.findall(pattern, said)) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return Taken(architecture[1], int(registers), int(spilled), kernel.shared_mem_bytes)


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def attention_case(rows: int) -> Case:
    q, bounds = shape(rows, LLADA.num_heads, LLADA.head_dim), shape(rows, dtype=jnp.int32)
    return functools.partial(attention, scale=LLADA.head_dim**-0.5), (q, q, q, bounds, bounds)


def split_case(heads: int, kv_heads: int) -> Case:
    pool = shape(2, 2048, kv_heads, 64, 128)
    table = PageTable._make(shape(n, dtype=jnp.int32) for n in (1024, 1024, 2))
    return functools.partial(split_attention, scale=0.1), (shape(1, 32, heads, 128), pool, pool, table)


def head_case(rows: int) -> Case:
    i, u, f, b = (shape(rows, dtype=t) for t in (jnp.int32, jnp.uint32, jnp.float32, jnp.bool_))
    bans = shape(rows, 2, dtype=jnp.int32)
    nothing = (None,) * 4  # no penalty, nothing lowered, no control, and the first id is 0
    asked = RowSampling._make(((u, u), i, f, b, i, f, f, b, i, bans, bans, b, *nothing))
    operands = shape(rows, LLADA.hidden_size), shape(LLADA.vocab_size, LLADA.hidden_size), asked
    return functools.partial(masked_logits, level=Level.TOP), operands


def experts_case(rows: int) -> Case:
    assert MOE.moe is not None
    weights = shape(MOE.moe.experts, MOE.hidden_size, MOE.moe.expert_size)
    sizes = shape(MOE.moe.experts, dtype=jnp.int32)

    def multiply(x: Any, weights: Any, sizes: Any, gate: Any, implementation: Any) -> Any:
        return grouped_matmul(x, weights, sizes, gate=gate, implementation=implementation)

    return multiply, (shape(rows, MOE.hidden_size), weights, sizes, weights)


def few_rows_case(*outputs: int, gated: bool) -> Case:
    stacks = [shape(2, n, LLADA.hidden_size) for n in outputs]
    return functools.partial(skinny_matmul, layer=1, gated=gated), (shape(32, LLADA.hidden_size), stacks)


CASES = {
    "attention, 4096 rows": attention_case(4096),
    "split attention, 32x32": split_case(32, 32),
    "split attention, 28x4": split_case(28, 4),
    "masked logits, 32 rows": head_case(32),
    "masked logits, 256 rows": head_case(256),
    "masked logits, 4096 rows": head_case(4096),
    "experts, 32768 rows": experts_case(32768),
    "qkv, 32 rows": few_rows_case(4096, 4096, 4096, gated=False),
    "gate and up, 32 rows": few_rows_case(12288, 12288, gated=True),
}


def measure(target: str) -> Iterator[dict[str, Any]]:
    """A row for each case on a described card."""
    capability = device_of(target).capability
    (device,) = target_sharding(target).device_set
    for name, (function, operands) in CASES.items():
        call = functools.partial(function, implementation="triton")
        with compiled_kernels() as kernels, jax.default_device(device):
            jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",))
        (kernel,) = kernels
        found = taken(kernel)
        row = {"target": target, "capability": capability, "kernel": name}
        numbers = {"registers": found.registers, "spilled": found.spilled, "shared_kib": found.shared / 1024}
        yield row | numbers | {"of_kib": shared_kib(capability)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_parser("triton_compiled", __doc__)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    args = parser.parse_args(arguments)
    table = []
    for target in args.targets:
        for row in measure(target):
            print_row(row)
            table.append(row)
    record("triton_compiled", table, args.out)
