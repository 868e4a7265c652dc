"""Kernels of Triton as operations of JAX, and what cards they run on have."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jdllm.pallas.device import target

_SHARED_KIB = {8.0: 163, 8.6: 99, 8.7: 163, 8.9: 99, 9.0: 227, 10.0: 227, 10.3: 227, 12.0: 99, 12.1: 99}
_LEAST_SHARED_KIB = 99

_F32_DEPTH = 32

LEAST = 16
"""Rows and columns of a product."""


MANY = 1 << 30
"""More than any size or number."""


class Schedule(NamedTuple):
    """How a kernel is compiled.

    - `warps`: of a program.
    - `stages`: loads that are under way in its loops.
    """

    warps: int
    stages: int


class Sizes(NamedTuple):
    """How rows and keys of an attention are cut, and how its kernel is compiled.

    - `rows`, `keys`: of a block, powers of 2 from `LEAST` on.
    """

    rows: int
    keys: int
    schedule: Schedule


class ProductSizes(NamedTuple):
    """How rows, weights and inputs of a product are cut, and how its kernel is compiled.

    - `rows`: of a program.
    - `columns`: of all products of a program together; each has half of them where there are two.
    - `depth`: inputs at a time.

    All are powers of 2, and what is left of each for a weight is `LEAST` or more.
    """

    rows: int
    columns: int
    depth: int
    schedule: Schedule


type SizeTable[S] = Mapping[int, Sequence[tuple[int, int, S]]]
"""By bytes of a number: sizes of heads, or numbers of rows, up to this one, on cards with this much shared
memory (KiB) or more."""


def fitting[S](table: SizeTable[S], size: int, itemsize: int, capability: float | None) -> S:
    """What a card's shared memory and registers allow.

    Arguments:
    - `size`: of a head, or the number of rows.
    - `itemsize`: bytes of a number of the operands.
    - `capability`: the card's compute capability, 9.0 for Hopper; `None` where it is not known.
    """
    shared = shared_kib(capability)
    return next(sizes for most, least, sizes in table[itemsize] if size <= most and shared >= least)


def block(size: int) -> int:
    """Rows or columns of a product that hold so many."""
    return max(1 << (size - 1).bit_length(), LEAST)


def score_depth(head_dim: int, itemsize: int) -> int:
    """How many numbers of a head are multiplied at a time for scores, a power of two.

    Without tensor cores, which do not multiply float32, operands are in registers: whole heads would not fit.
    """
    return block(head_dim) if itemsize == 2 else _F32_DEPTH


def shared_kib(capability: float | None) -> int:
    """KiB of shared memory that a program may have; of a capability that is not known, the least of all."""
    return _SHARED_KIB.get(capability or 0.0, _LEAST_SHARED_KIB)


def launch(
    kernel: Any,
    *operands: jax.Array | int,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    schedule: Schedule,
    **constants: float,
) -> list[jax.Array]:
    """Run a kernel for the device that is traced for.

    Arguments:
    - `kernel`: a function of `triton.jit`. It takes pointers and integers for the operands, pointers for the
      results, and the constants.
    - `grid`: programs; the first axis runs fastest.
    - `constants`: what it is compiled for.
    """
    # Triton takes a while to import: only where it runs.
    jax_triton = importlib.import_module("jax_triton")
    capability = target().capability
    return jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_shape=list(out_shape),
        grid=grid,
        num_warps=schedule.warps,
        num_stages=schedule.stages,
        compute_capability=capability and round(10 * capability),
        **constants,
    )
