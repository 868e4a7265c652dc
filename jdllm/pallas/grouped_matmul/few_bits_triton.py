"""Grouped products with matrices in few bits in Triton: units of rows are found by XLA, one kernel multiplies
them."""

import jax
import jax.numpy as jnp

from jdllm.pallas.device import target
from jdllm.pallas.grouped_matmul.few_bits_triton_kernel import multiply_few_bits_units
from jdllm.pallas.grouped_matmul.limits import check_few_bits_triton
from jdllm.pallas.grouped_matmul.row_units import row_units
from jdllm.pallas.grouped_matmul.triton import TOGETHER
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Product, X, sides
from jdllm.pallas.quantised_matmul.triton import ordered_rows, sizes_for
from jdllm.pallas.triton_launch import ProductSizes, launch
from jdllm.quantised import GROUP, Grouped, Quantised


def grouped_matmul_few_bits_triton(
    x: X,
    weights: Quantised,
    group_sizes: GroupSizes,
    first_group: FirstGroup,
    gate: Quantised | None = None,
    *,
    sizes: ProductSizes | None = None,
) -> Product:
    """Triton form of `jdllm.pallas.grouped_matmul.grouped_matmul` for matrices in 8 or 4 bits.

    A gated product writes neither of its two products, which are rounded as those of
    `grouped_matmul_triton`. No weight is rounded: sums are scaled, in 4 bits those of each step.

    Every sum adds its terms in an order that depends on the cut alone.

    Arguments:
    - `sizes`: by default those of the device that is traced for, and of the mean size of a group.

    Raises `NotImplementedError` where `check_few_bits_triton` does.
    """
    check_few_bits_triton(x, weights, gate)
    (rows, (k, n)), groups = (x.shape[0], sides(weights)), group_sizes.shape[0]
    if rows == 0 or groups == 0:
        return jnp.zeros((rows, n), x.dtype)
    sizes = sizes or sizes_for(-(-rows // groups), x.dtype.itemsize, target().capability)
    columns = sizes.columns // (1 if gate is None else 2)
    units, gates = row_units(group_sizes, first_group, rows, sizes.rows), weights if gate is None else gate
    programs = -(-units.matrix.shape[0] // TOGETHER) * TOGETHER * -(-n // columns)
    (out,) = launch(
        multiply_few_bits_units,
        *(ordered_rows(x, weights), gates.values, gates.scales, weights.values, weights.scales, *units, rows),
        out_shape=[jax.ShapeDtypeStruct((rows, n), x.dtype)],
        grid=(programs,),
        schedule=sizes.schedule,
        GROUPS=groups,
        K=k,
        N=n,
        GROUP=GROUP if isinstance(weights, Grouped) else 0,
        GATED=gate is not None,
        TOGETHER=TOGETHER,
        BLOCK_R=sizes.rows,
        BLOCK_N=columns,
        BLOCK_K=sizes.depth,
    )
    return out
