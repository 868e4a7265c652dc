"""Grouped products in Triton: units of rows are found by XLA, one kernel multiplies them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jdllm.pallas.device import target
from jdllm.pallas.grouped_matmul.limits import check_triton
from jdllm.pallas.grouped_matmul.row_units import RowUnits, row_units
from jdllm.pallas.grouped_matmul.triton_kernel import multiply_units
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Plain, Product, Weights, X, sides
from jdllm.pallas.triton_launch import MANY, ProductSizes, Schedule, SizeTable, fitting, launch

_TOGETHER = 8
"""Units whose programs start together."""


_SIZES: SizeTable[ProductSizes] = {
    2: (
        (64, 227, ProductSizes(64, 128, 64, Schedule(4, 4))),
        (64, 99, ProductSizes(64, 128, 32, Schedule(4, 4))),
        (MANY, 227, ProductSizes(128, 256, 64, Schedule(8, 4))),
        (MANY, 99, ProductSizes(128, 128, 32, Schedule(4, 4))),
    ),
    4: ((MANY, 99, ProductSizes(64, 128, 16, Schedule(4, 3))),),
}
"""Of up to so many rows of a group. None has fewer rows than the tensor cores of any card take at a time, for
which the order of sums might be another."""


sizes_for = functools.partial(fitting, _SIZES)


def grouped_matmul_triton(
    x: X,
    weights: Plain,
    group_sizes: GroupSizes,
    first_group: FirstGroup,
    gate: Plain | None = None,
    *,
    sizes: ProductSizes | None = None,
) -> Product:
    """Triton form of `jdllm.pallas.grouped_matmul.grouped_matmul`.

    A gated product reads `x` once and writes neither of its two products. Both are rounded to the dtype of
    `x`, so is the silu of the first, and so is the result.

    Every sum adds its terms in the same order, whatever the other rows and the cut are: a row's bits depend
    on the row and its matrix only.

    Arguments:
    - `sizes`: by default those of the device that is traced for.

    Raises `NotImplementedError` where `check_triton` does.
    """
    check_triton(x, weights, gate)
    operands = x, weights if gate is None else gate, weights
    given = x, weights, group_sizes, first_group, sizes, sizes_for
    return launch_units(multiply_units, lambda units: (*operands, *units), *given, gated=gate is not None)


def launch_units(
    kernel: Any,
    operands: Callable[[RowUnits], Sequence[Array | int]],
    x: X,
    weights: Weights,
    group_sizes: GroupSizes,
    first_group: FirstGroup,
    sizes: ProductSizes | None,
    sizes_for: Callable[[int, int, float | None], ProductSizes],
    *,
    gated: bool,
    **constants: int,
) -> Product:
    """Multiply each unit of rows with the matrix of its group, by one kernel.

    Arguments:
    - `kernel`: what multiplies a unit's rows with some columns of its matrix.
    - `operands`: what the kernel is given before its result, from the units of rows.
    - `x`, `weights`, `group_sizes`, `first_group`: as `grouped_matmul` has them.
    - `sizes`: `None` for those that `sizes_for` returns.
    - `sizes_for`: of so many rows of a group, bytes of a number and the capability of the card.
    - `gated`: whether the result is a gated product.
    - `constants`: of the kernel, beside those that all of these have.
    """
    (rows, (k, n)), groups = (x.shape[0], sides(weights)), group_sizes.shape[0]
    if rows == 0 or groups == 0:
        return jnp.zeros((rows, n), x.dtype)
    sizes = sizes or sizes_for(-(-rows // groups), x.dtype.itemsize, target().capability)
    columns = sizes.columns // (2 if gated else 1)
    units = row_units(group_sizes, first_group, rows, sizes.rows)
    programs = -(-units.matrix.shape[0] // _TOGETHER) * _TOGETHER * -(-n // columns)
    (out,) = launch(
        kernel,
        *operands(units),
        out_shape=[jax.ShapeDtypeStruct((rows, n), x.dtype)],
        grid=(programs,),
        schedule=sizes.schedule,
        GROUPS=groups,
        K=k,
        N=n,
        GATED=gated,
        TOGETHER=_TOGETHER,
        BLOCK_R=sizes.rows,
        BLOCK_N=columns,
        BLOCK_K=sizes.depth,
        **constants,
    )
    return out
