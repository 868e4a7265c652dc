"""Grouped products through tokamax (the extra `bench`): a peer of ours.

Source: `tokamax.ragged_dot` of tokamax 0.0.14, whose kernel for Hopper reads matrices `[inputs, outputs]`.
"""

import jax.numpy as jnp
from jax import lax

from jdllm.pallas.grouped_matmul.gated import gated_by_two_products
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Product, Weights, X


@gated_by_two_products
def grouped_matmul_tokamax(
    x: X, weights: Weights, group_sizes: GroupSizes, first_group: FirstGroup
) -> Product:
    """`jdllm.pallas.grouped_matmul.grouped_matmul` by tokamax's Mosaic GPU kernel, for bfloat16 and float16.

    The groups of other layers are passed as empty ones: a kernel's operand is no slice of the weights.

    Raises `NotImplementedError` where tokamax is not installed, and for what it cannot run.
    """
    try:
        import tokamax  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        raise NotImplementedError(f"tokamax cannot be imported ({e}): install the extra 'bench'") from None
    sizes = lax.dynamic_update_slice(
        jnp.zeros(weights.shape[0], jnp.int32), jnp.asarray(group_sizes, jnp.int32), (first_group,)
    )
    return tokamax.ragged_dot(x, weights, sizes, implementation="mosaic", preferred_element_type=x.dtype)
