"""The only place that knows tokamax's attention, which the pure-XLA path runs without.

Source: `PallasMosaicGpuFlashAttention` of tokamax 0.0.14 (a private module: pinned by the extra `kernels`).
"""

import jax
import jax.numpy as jnp

from jdllm.pallas.attention.types import AttentionOutput, Bounds, Keys, Queries
from jdllm.pallas.device import Target

HEAD_DIMS = (64, 128, 256)
_TILE = 128


def check_tokamax(q: Queries | jax.ShapeDtypeStruct, device: Target) -> None:
    """Raise `NotImplementedError`, naming the limit, where tokamax cannot attend `q` on `device`."""
    if not device.hopper:
        raise NotImplementedError("tokamax attention runs on Hopper only")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"tokamax attention takes bfloat16 and float16, not {q.dtype}")
    if q.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"tokamax attention takes heads of {HEAD_DIMS}, not of {q.shape[-1]}")
    try:
        import tokamax  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        raise NotImplementedError(f"tokamax cannot be imported ({e}): install the extra 'kernels'") from None


def attention_tokamax(
    q: Queries, k: Keys, v: Keys, k_start: Bounds, k_end: Bounds, *, scale: float
) -> AttentionOutput:
    """Mosaic GPU form of `jdllm.pallas.attention.attention`: blocks outside a range are skipped.

    The kernel takes whole tiles of 128 queries: others are padded with rows that see nothing.
    """
    from tokamax._src.ops.attention.base import Mask  # pyright: ignore[reportMissingImports]
    from tokamax._src.ops.attention.pallas_mosaic_gpu import (  # pyright: ignore[reportMissingImports]
        PallasMosaicGpuFlashAttention,
    )

    rows = q.shape[0]
    padding = -rows % _TILE
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    start, end = (jnp.pad(jnp.asarray(bound), (0, padding)) for bound in (k_start, k_end))
    mask = Mask(k_start=start, k_end=end)
    o, (m, total) = PallasMosaicGpuFlashAttention()(
        q, k, v, logits_scale=scale, mask=mask, return_residuals=True
    )
    return AttentionOutput(o[:rows], m.T[:rows], total.T[:rows])
