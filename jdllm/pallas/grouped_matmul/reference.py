"""Every row times every matrix: the oracle of the other forms."""

import jax.numpy as jnp
from jax import lax

from jdllm.pallas.grouped_matmul.gated import gated_by_two_products
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Product, Weights, X, wide


@gated_by_two_products
def grouped_matmul_reference(
    x: X, weights: Weights, group_sizes: GroupSizes, first_group: FirstGroup
) -> Product:
    """Dense form of `jdllm.pallas.grouped_matmul.grouped_matmul`; memory grows with rows x groups x n."""
    groups = group_sizes.shape[0]
    own = wide(weights, lambda part: lax.dynamic_slice_in_dim(part, first_group, groups), x.dtype)
    every = jnp.einsum(
        "rk,gkn->rgn", x, own, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    return jnp.take_along_axis(every, group[:, None, None], axis=1)[:, 0].astype(x.dtype)
