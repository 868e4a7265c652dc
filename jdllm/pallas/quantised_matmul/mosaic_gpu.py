"""Products with matrices in few bits on Hopper."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.pallas.device import target
from jdllm.pallas.products import Interpreted, TensorCores
from jdllm.pallas.quantised_matmul.kernel import tile_products
from jdllm.pallas.quantised_matmul.limits import check_mosaic_gpu
from jdllm.pallas.quantised_matmul.tiles import Tiles, default_tiles
from jdllm.quantised import Quantised, Shifted


def quantised_matmul_mosaic_gpu(
    x: Float[Array, "rows k"], weight: Quantised, *, layer: Int[Array, ""] | int, tiles: Tiles | None = None
) -> Float[Array, "rows n"]:
    """Hopper form of `jdllm.pallas.quantised_matmul.quantised_matmul`, for bfloat16 and float16.

    Every sum adds its terms in the order of the inputs: the bits of a row depend on the row alone. Weights of
    4 bits are scaled, and rounded to the dtype of `x`, before they are multiplied, as by XLA. A scale is the
    sum of two numbers of this dtype; one beside an offset is a number of this dtype, and so is the offset.
    Sums of weights of 8 bits are scaled.

    Arguments:
    - `tiles`: the cut; by default one that suits the shapes.

    Raises `NotImplementedError`, naming the limit, for operands and cuts that the form cannot take.
    """
    check_mosaic_gpu(x, weight)
    (rows, k), n = x.shape, weight.shape[1]
    shifted = isinstance(weight, Shifted)
    tiles = tiles or default_tiles(rows, n, k, weight.bits, shifted=shifted)
    more = -rows % tiles.rows
    padded = jnp.pad(x, ((0, more), (0, 0))) if more else x
    arithmetic = TensorCores if target().on_cuda else Interpreted
    layer = jnp.asarray(layer, jnp.int32)
    scales = (weight.scales, weight.offsets) if shifted else (weight.scales,)
    return tile_products(padded, weight.values, scales, layer, tiles, arithmetic)[:rows]
