"""The only place that knows tokamax, which the pure-XLA path runs without.

Source: tokamax.ragged_dot of tokamax 0.0.14, whose kernel for Hopper reads matrices `[inputs, outputs]`.
"""

import jax.numpy as jnp
from jax import lax

from jdllm.pallas.grouped_matmul.gated import gated_by_two_products
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Product, Weights, X


@gated_by_two_products
def grouped_matmul_tokamax(
    x: X, weights: Weights, group_sizes: GroupSizes, first_group: FirstGroup
) -> Product:
    """Mosaic GPU form of `jdllm.pallas.grouped_matmul.grouped_matmul`, for bfloat16 and float16.

    The groups of other layers are passed as empty ones: a kernel's operand is no slice of the weights.

    Raises `NotImplementedError` for what tokamax cannot run, its own absence included.
    """
    try:
        import tokamax  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        raise NotImplementedError(f"tokamax cannot be imported ({e}): install the extra 'kernels'") from None
    sizes = lax.dynamic_update_slice(
        jnp.zeros(weights.shape[0], jnp.int32), jnp.asarray(group_sizes, jnp.int32), (first_group,)
    )
    return tokamax.ragged_dot(x, weights, sizes, implementation="mosaic", preferred_element_type=x.dtype)
