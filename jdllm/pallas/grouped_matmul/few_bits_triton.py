"""Grouped products with matrices in few bits in Triton: units of rows are found by XLA, one kernel multiplies
them."""

from jdllm.pallas.grouped_matmul.few_bits_triton_kernel import multiply_few_bits_units
from jdllm.pallas.grouped_matmul.limits import check_few_bits_triton
from jdllm.pallas.grouped_matmul.triton import launch_units
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Product, X
from jdllm.pallas.quantised_matmul.triton import ordered_rows, sizes_for
from jdllm.pallas.triton_launch import ProductSizes
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
    gates = weights if gate is None else gate
    matrices = gates.values, gates.scales, weights.values, weights.scales
    given = x, weights, group_sizes, first_group, sizes, sizes_for
    return launch_units(
        multiply_few_bits_units,
        lambda units: (ordered_rows(x, weights), *matrices, *units, len(x)),
        *given,
        gated=gate is not None,
        GROUP=GROUP if isinstance(weights, Grouped) else 0,
    )
