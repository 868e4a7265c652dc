"""Addition and norm of a few rows: the entry point, for Hopper only.

Elsewhere an addition and `jdllm.layers.rms_norm` do the same.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jdllm.pallas.device import target
from jdllm.pallas.exchange.layout import MAX_COLUMNS, ROW_AREAS

_COLUMN_UNIT = 512  # four columns for each thread of a warpgroup


def check_add_norm(dtype: jnp.dtype, columns: int, rows_over_cards: int = 0) -> None:
    """Raise `NotImplementedError`, naming the limit, where the kernel cannot run.

    Arguments:
    - `dtype`, `columns`: of the residual stream.
    - `rows_over_cards`: how many rows of it the kernel exchanges with other cards.
    """
    target().check_hopper("addition and norm")
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the kernel of addition and norm takes bfloat16 or float16, not {dtype}")
    if columns % _COLUMN_UNIT:
        raise NotImplementedError(
            f"the kernel of addition and norm takes multiples of {_COLUMN_UNIT} columns, not {columns}"
        )
    if rows_over_cards > ROW_AREAS or (rows_over_cards and columns > MAX_COLUMNS):
        raise NotImplementedError(
            f"the kernel of addition and norm exchanges up to {ROW_AREAS} rows of up to {MAX_COLUMNS} "
            f"columns, not {rows_over_cards} of {columns}"
        )


def add_norm(
    h: Float[Array, "rows d"],
    parts: Float[Array, "parts rows d"],
    norms: Float[Array, "layers d"],
    layer: Int[Array, ""] | int,
    *,
    eps: float,
    chained: bool = False,
    addresses: Int32[Array, "1 words"] | None = None,
) -> tuple[Float[Array, "rows d"], Float[Array, "rows d"]]:
    """Add what a branch has given to the residual stream, and norm the sum.

    Arguments:
    - `h`: the residual stream, bfloat16 or float16.
    - `parts`: what is added, in parts of f32: their sum is rounded to the dtype of `h` first. A single part
      may be of that dtype.
    - `norms`: weights of the norm of all layers.
    - `layer`: which of them.
    - `eps`: of the norm.
    - `chained`: whether the kernel is part of a chain (`jdllm.pallas.chain`): then `norms` and `layer` are
      older than it.
    - `addresses`: inside `jax.shard_map` over cards, this card's row of
      `jdllm.pallas.exchange.addresses_of`: what is added is then the sum over cards of what each of them has
      rounded. As with `jdllm.pallas.exchange.sum_over_cards` all cards must call the function equally often.

    Returns the sum, and the sum normed as `jdllm.layers.rms_norm` does, in the dtype of `h`.

    Raises `NotImplementedError` where the kernel cannot run, naming its limit.
    """
    check_add_norm(h.dtype, h.shape[1], 0 if addresses is None else len(h))
    # Pallas for GPUs takes a while to import: only where it runs.
    from jdllm.pallas.add_norm.mosaic_gpu import add_norm_mosaic_gpu

    place = jnp.asarray(layer, jnp.int32)
    return add_norm_mosaic_gpu(h, parts, norms, place, addresses, eps=eps, chained=chained)
