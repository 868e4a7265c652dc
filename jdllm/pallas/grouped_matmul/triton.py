"""Grouped products in Triton: units of rows are found by XLA, one kernel multiplies them."""

import functools

import jax
import jax.numpy as jnp

from jdllm.pallas.device import target
from jdllm.pallas.grouped_matmul.limits import check_triton
from jdllm.pallas.grouped_matmul.row_units import row_units
from jdllm.pallas.grouped_matmul.triton_kernel import multiply_units
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Plain, Product, X
from jdllm.pallas.triton_launch import MANY, ProductSizes, Schedule, SizeTable, fitting, launch

TOGETHER = 8
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
    (rows, k), n, groups = x.shape, weights.shape[2], group_sizes.shape[0]
    if rows == 0 or groups == 0:
        return jnp.zeros((rows, n), x.dtype)
    sizes = sizes or sizes_for(-(-rows // groups), x.dtype.itemsize, target().capability)
    columns = sizes.columns // (1 if gate is None else 2)
    units = row_units(group_sizes, first_group, rows, sizes.rows)
    programs = -(-units.matrix.shape[0] // TOGETHER) * TOGETHER * -(-n // columns)
    (out,) = launch(
        multiply_units,
        *(x, weights if gate is None else gate, weights, *units),
        out_shape=[jax.ShapeDtypeStruct((rows, n), x.dtype)],
        grid=(programs,),
        schedule=sizes.schedule,
        GROUPS=groups,
        K=k,
        N=n,
        GATED=gate is not None,
        TOGETHER=TOGETHER,
        BLOCK_R=sizes.rows,
        BLOCK_N=columns,
        BLOCK_K=sizes.depth,
    )
    return out
