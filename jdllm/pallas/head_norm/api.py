"""Norm and rotation of the heads of a few rows: the entry point, for Hopper only.

Elsewhere `jdllm.layers.rms_norm` and `jdllm.layers.rotate` do the same.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jdllm.pallas.device import target

_HEADS_UNIT = 4  # a head for each warp of a warpgroup
_PAIRS_UNIT = 32  # a pair of dimensions for each lane of a warp

Heads = Float[Array, "rows heads head_dim"]


def check_head_norm(dtype: jnp.dtype, heads: Sequence[int], head_dim: int) -> None:
    """Raise `NotImplementedError`, naming the limit, where the kernel cannot run.

    Arguments:
    - `dtype`: of queries and keys.
    - `heads`: how many heads queries have, and keys.
    - `head_dim`: dimensions of a head.
    """
    target().check_hopper("norm of heads")
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the kernel of norms of heads takes bfloat16 or float16, not {dtype}")
    if any(count % _HEADS_UNIT for count in heads):
        raise NotImplementedError(
            f"the kernel of norms of heads takes multiples of {_HEADS_UNIT} heads, not {list(heads)}"
        )
    if head_dim % (2 * _PAIRS_UNIT):
        raise NotImplementedError(
            f"the kernel of norms of heads takes heads of multiples of {2 * _PAIRS_UNIT} dimensions, "
            f"not of {head_dim}"
        )


def head_norm(
    q: Heads,
    k: Float[Array, "rows kv_heads head_dim"],
    norms: tuple[Float[Array, "layers head_dim"], Float[Array, "layers head_dim"]],
    layer: Int[Array, ""] | int,
    rotation: tuple[Float32[Array, "rows pairs"], Float32[Array, "rows pairs"]],
    *,
    eps: float,
    chained: bool = False,
) -> tuple[Heads, Float[Array, "rows kv_heads head_dim"]]:
    """Norm each head of queries and keys, then rotate it.

    Arguments:
    - `q`, `k`: queries and keys, bfloat16 or float16.
    - `norms`: weights of the norms of queries and of keys, of all layers.
    - `layer`: which of them.
    - `rotation`: cosine and sine of each row, of whole heads.
    - `eps`: of the norms.
    - `chained`: whether the kernel is part of a chain (`jdllm.pallas.chain`): then all but `q` and `k` is
      older than it.

    Returns queries and keys, normed as `jdllm.layers.rms_norm` does and rotated as `jdllm.layers.rotate`
    does, in the dtype of `q`.

    Raises `NotImplementedError` where the kernel cannot run, naming its limit.
    """
    check_head_norm(q.dtype, (q.shape[1], k.shape[1]), q.shape[2])
    # Pallas for GPUs takes a while to import: only where it runs.
    from jdllm.pallas.head_norm.mosaic_gpu import head_norm_mosaic_gpu

    place = jnp.asarray(layer, jnp.int32)
    return head_norm_mosaic_gpu(q, k, norms, place, rotation, eps=eps, chained=chained)
