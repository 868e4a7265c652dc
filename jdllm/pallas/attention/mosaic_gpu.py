"""Packed attention on Hopper."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jdllm.pallas.attention.kernel import CLUSTER_ROWS, Ranges, Tiles, attend
from jdllm.pallas.attention.limits import check_mosaic_gpu
from jdllm.pallas.attention.types import AttentionOutput, Bounds, Keys, Queries
from jdllm.pallas.hopper import STRIP
from jdllm.pallas.products import Products, TensorCores

_TILES = Tiles()


def attention_mosaic_gpu(
    q: Queries,
    k: Keys,
    v: Keys,
    k_start: Bounds,
    k_end: Bounds,
    *,
    scale: float,
    tiles: Tiles = _TILES,
    products: Products = TensorCores,
) -> AttentionOutput:
    """Mosaic GPU form of `jdllm.pallas.attention.attention`: blocks of keys that no row sees are skipped.

    Probabilities are rounded to the type of the values before the second product, as in any flash attention.

    Arguments:
    - `tiles`: how the keys are cut; by default what is fastest on an H200.
    - `products`: how tiles are multiplied; another form is for the interpreter.

    Raises `NotImplementedError` where `check_mosaic_gpu` does.
    """
    check_mosaic_gpu(q, scale)
    rows = q.shape[0]
    ranges = _ranges(jnp.asarray(k_start, jnp.int32), jnp.asarray(k_end, jnp.int32), k.shape[0])
    q, k, v = (jnp.pad(x, ((0, -len(x) % STRIP), (0, 0), (0, 0))) for x in (q, k, v))
    o, m, l = attend(q, k, v, ranges, scale, tiles, products)  # noqa: E741
    return AttentionOutput(o[:rows], m[:, :rows].T, l[:, :rows].T)


def _ranges(start: Int[Array, " rows"], end: Int[Array, " rows"], keys: int) -> Ranges:
    end = jnp.minimum(end, keys)
    seen = start < end
    padding = (0, -len(start) % CLUSTER_ROWS)
    start, end = (jnp.pad(jnp.where(seen, bound, 0), padding) for bound in (start, end))
    starts, ends = (bound.reshape(-1, CLUSTER_ROWS) for bound in (start, end))
    lowest = jnp.where(starts < ends, starts, keys).min(axis=1)
    highest_end = ends.max(axis=1)
    first = jnp.minimum(lowest, highest_end) // STRIP * STRIP
    return Ranges(
        jnp.stack([start, end]), jnp.stack([first, starts.max(axis=1), ends.min(axis=1), highest_end])
    )
