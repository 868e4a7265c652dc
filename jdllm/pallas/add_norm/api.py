"""Addition and norm of a few rows: the entry point, for Hopper only.

Elsewhere an addition and `jdllm.layers.rms_norm` do the same.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jdllm.pallas.device import target

_COLUMN_UNIT = 512  # four columns for each thread of a warpgroup


def check_add_norm(dtype: jnp.dtype, columns: int) -> None:
    """Raise `NotImplementedError`, naming the limit, where the kernel cannot run.

    Arguments:
    - `dtype`, `columns`: of the residual stream.
    """
    target().check_hopper("addition and norm")
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the kernel of addition and norm takes bfloat16 or float16, not {dtype}")
    if columns % _COLUMN_UNIT:
        raise NotImplementedError(
            f"the kernel of addition and norm takes multiples of {_COLUMN_UNIT} columns, not {columns}"
        )


def add_norm(
    h: Float[Array, "rows d"],
    parts: Float32[Array, "parts rows d"],
    norms: Float[Array, "layers d"],
    layer: Int[Array, ""] | int,
    *,
    eps: float,
    chained: bool = False,
) -> tuple[Float[Array, "rows d"], Float[Array, "rows d"]]:
    """Add what a branch has given to the residual stream, and norm the sum.

    Arguments:
    - `h`: the residual stream, bfloat16 or float16.
    - `parts`: what is added, in parts: their sum is rounded to the dtype of `h` first.
    - `norms`: weights of the norm of all layers.
    - `layer`: which of them.
    - `eps`: of the norm.
    - `chained`: whether the kernel is part of a chain (`jdllm.pallas.chain`): then `norms` and `layer` are
      older than it.

    Returns the sum, and the sum normed as `jdllm.layers.rms_norm` does, in the dtype of `h`.

    Raises `NotImplementedError` where the kernel cannot run, naming its limit.
    """
    check_add_norm(h.dtype, h.shape[1])
    # Pallas for GPUs takes a while to import: only where it runs.
    from jdllm.pallas.add_norm.mosaic_gpu import add_norm_mosaic_gpu

    return add_norm_mosaic_gpu(h, parts, norms, jnp.asarray(layer, jnp.int32), eps=eps, chained=chained)
