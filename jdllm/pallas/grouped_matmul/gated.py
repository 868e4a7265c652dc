"""The gated product of forms that have no kernel for it."""

import functools
from collections.abc import Callable

import jax

from jdllm.pallas.grouped_matmul.types import FirstGroup, Gate, GroupSizes, Product, Weights, X


def gated_by_two_products(product: Callable[[X, Weights, GroupSizes, FirstGroup], Product]):
    """Give a form the argument `gate` of `jdllm.pallas.grouped_matmul.grouped_matmul`."""

    @functools.wraps(product)
    def form(
        x: X, weights: Weights, group_sizes: GroupSizes, first_group: FirstGroup, gate: Gate = None
    ) -> Product:
        if gate is None:
            return product(x, weights, group_sizes, first_group)
        gates = jax.nn.silu(product(x, gate, group_sizes, first_group))
        return gates * product(x, weights, group_sizes, first_group)

    return form
