"""Row by row, what lies between the products of a few rows: the entry points, for Hopper only.

Elsewhere `jdllm.models.layers.rms_norm` and `jdllm.models.rotary.rotate` do the same.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jdllm.pallas.device import target
from jdllm.pallas.rowwise.limits import check_mosaic_gpu


def check_rowwise(dtype: jnp.dtype, columns: int, heads: tuple[int, ...], pairs: int) -> None:
    """Raise `NotImplementedError`, naming the limit, where the kernels cannot run.

    Arguments:
    - `dtype`: of the residual stream.
    - `columns`: of it.
    - `heads`: how many queries and keys have.
    - `pairs`: rotated pairs of a head, which are all of it.
    """
    target().check_hopper("operations on single rows")
    check_mosaic_gpu(dtype, columns, heads, pairs)


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
    - `chained`: as in `jdllm.pallas.chain`; `norms` and `layer` are older than the chain.

    Returns the sum, and the sum normed as `jdllm.models.layers.rms_norm` does, in the dtype of `h`.

    Raises `NotImplementedError` where the kernel cannot run, naming its limit.
    """
    check_rowwise(h.dtype, h.shape[1], (), 0)
    # Pallas for GPUs takes a while to import: only where it runs.
    from jdllm.pallas.rowwise.kernel import add_norm_rows

    return add_norm_rows(h, parts, norms, jnp.asarray(layer, jnp.int32), eps=eps, chained=chained)


def rotate_rows(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    cos: Float32[Array, "rows pairs"],
    sin: Float32[Array, "rows pairs"],
    *,
    chained: bool = False,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows kv_heads head_dim"]]:
    """Rotate queries and keys as `jdllm.models.rotary.rotate` does, in one kernel.

    Arguments:
    - `q`, `k`: bfloat16 or float16, heads of twice `pairs`.
    - `cos`, `sin`: of each row's angles.
    - `chained`: as in `jdllm.pallas.chain`; `cos` and `sin` are older than the chain.

    Raises `NotImplementedError` where the kernel cannot run, naming its limit.
    """
    check_rowwise(q.dtype, 0, (q.shape[1], k.shape[1]), cos.shape[1])
    if q.shape[2] != 2 * cos.shape[1]:
        raise NotImplementedError(f"the rotation takes whole heads, not {2 * cos.shape[1]} of {q.shape[2]}")
    from jdllm.pallas.rowwise.kernel import rotated_rows

    return rotated_rows(q, k, cos, sin, chained=chained)
