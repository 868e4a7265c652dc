"""Products with matrices in few bits by XLA, on any device."""

from jaxtyping import Array, Float, Int

from jdllm.layers import linear
from jdllm.quantised import Quantised


def quantised_matmul_xla(
    x: Float[Array, "rows k"], weight: Quantised, *, layer: Int[Array, ""] | int
) -> Float[Array, "rows n"]:
    """Portable form of `jdllm.pallas.quantised_matmul.quantised_matmul`: the wide matrix is in memory."""
    return linear(x, weight.of_layer(layer))
