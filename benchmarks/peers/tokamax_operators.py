"""Packed attention and grouped products through tokamax (the extra `bench`): peers of ours.

Sources: `PallasMosaicGpuFlashAttention` of tokamax 0.0.14, a private module: the extra pins the version; and
`tokamax.ragged_dot`, whose kernel for Hopper reads matrices `[inputs, outputs]`.
"""

import jax.numpy as jnp
from jax import lax

from jdllm.pallas.attention.types import AttentionOutput, Bounds, Keys, Queries
from jdllm.pallas.grouped_matmul.gated import gated_by_two_products
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Product, Weights, X

_TILE = 128


def attention_tokamax(
    q: Queries, k: Keys, v: Keys, k_start: Bounds, k_end: Bounds, *, scale: float
) -> AttentionOutput:
    """`jdllm.pallas.attention.attention` by tokamax's Mosaic GPU kernel, for bfloat16 and float16.

    The kernel takes whole tiles of 128 queries: others are padded with rows that see nothing.

    Raises `NotImplementedError` where tokamax is not installed, and for what it cannot run.
    """
    try:
        from tokamax._src.ops.attention.base import Mask  # pyright: ignore[reportMissingImports]
        from tokamax._src.ops.attention.pallas_mosaic_gpu import (  # pyright: ignore[reportMissingImports]
            PallasMosaicGpuFlashAttention,
        )
    except ImportError as e:
        raise NotImplementedError(f"tokamax cannot be imported ({e}): install the extra 'bench'") from None
    rows = q.shape[0]
    padding = -rows % _TILE
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    start, end = (jnp.pad(jnp.asarray(bound), (0, padding)) for bound in (k_start, k_end))
    o, (m, total) = PallasMosaicGpuFlashAttention()(
        q, k, v, logits_scale=scale, mask=Mask(k_start=start, k_end=end), return_residuals=True
    )
    return AttentionOutput(o[:rows], m.T[:rows], total.T[:rows])


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
