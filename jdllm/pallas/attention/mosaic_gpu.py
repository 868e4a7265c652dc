"""Packed attention on Hopper."""

import jax.numpy as jnp

from jdllm.pallas.attention.kernel import Tiles, attend
from jdllm.pallas.attention.limits import check_mosaic_gpu
from jdllm.pallas.attention.ranges import Ranges, ranges_of
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
    ranges: Ranges | None = None,
    tiles: Tiles = _TILES,
    products: Products = TensorCores,
) -> AttentionOutput:
    """Mosaic GPU form of `jdllm.pallas.attention.attention`: blocks of keys that no row sees are skipped.

    Probabilities are rounded to the type of the values before the second product, as in any flash attention.

    Arguments:
    - `ranges`: `ranges_of` the bounds, where it is there already.
    - `tiles`: how the keys are cut; by default what is fastest on an H200.
    - `products`: how tiles are multiplied; another form is for the interpreter.

    Raises `NotImplementedError` where `check_mosaic_gpu` does.
    """
    check_mosaic_gpu(q, scale)
    rows = q.shape[0]
    ranges = ranges or ranges_of(k_start, k_end, k.shape[0])
    q, k, v = (jnp.pad(x, ((0, -len(x) % STRIP), (0, 0), (0, 0))) for x in (q, k, v))
    o, m, l = attend(q, k, v, ranges, scale, tiles, products)  # noqa: E741
    return AttentionOutput(o[:rows], m[:, :rows].T, l[:, :rows].T)
