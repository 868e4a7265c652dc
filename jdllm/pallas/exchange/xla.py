"""The portable forms of a sum over cards and of joining rows: XLA's collectives."""

from jax import lax
from jaxtyping import Array, Float, Int32


def exchange_xla(
    part: Float[Array, "rows d"], addresses: Int32[Array, "1 words"], *, axis_name: str
) -> Float[Array, "rows d"]:
    """`jdllm.pallas.exchange.sum_over_cards`, without `addresses`; sums have the order and the type that XLA
    chooses."""
    del addresses
    return lax.psum(part, axis_name)


def join_xla(
    part: Float[Array, "rows d"], addresses: Int32[Array, "1 words"], *, axis_name: str
) -> Float[Array, "all_rows d"]:
    """`jdllm.pallas.exchange.rows_of_all_cards`, without `addresses`."""
    del addresses
    return lax.all_gather(part, axis_name, tiled=True)
