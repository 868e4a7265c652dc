"""Packed attention in Triton."""

import functools
import math

import jax
import jax.numpy as jnp

from jdllm.pallas.attention.limits import check_triton
from jdllm.pallas.attention.triton_kernel import attend
from jdllm.pallas.attention.types import AttentionOutput, Bounds, Keys, Queries
from jdllm.pallas.device import target
from jdllm.pallas.triton_launch import Schedule, Sizes, SizeTable, block, fitting, launch, score_depth

_SIZES: SizeTable[Sizes] = {
    2: (
        (64, 227, Sizes(128, 128, Schedule(8, 2))),
        (64, 99, Sizes(128, 64, Schedule(8, 2))),
        (128, 227, Sizes(128, 128, Schedule(8, 3))),
        (128, 99, Sizes(128, 32, Schedule(8, 3))),
        (256, 227, Sizes(64, 32, Schedule(8, 3))),
        (256, 163, Sizes(64, 64, Schedule(8, 2))),
        (256, 99, Sizes(64, 32, Schedule(8, 2))),
    ),
    4: (
        (128, 99, Sizes(64, 64, Schedule(8, 1))),
        (256, 99, Sizes(64, 32, Schedule(8, 1))),
    ),
}
"""Keys and values are read once for each block of rows: so these come first, and keys take what is left."""


sizes_for = functools.partial(fitting, _SIZES)


def attention_triton(
    q: Queries,
    k: Keys,
    v: Keys,
    k_start: Bounds,
    k_end: Bounds,
    *,
    scale: float,
    sizes: Sizes | None = None,
) -> AttentionOutput:
    """Triton form of `jdllm.pallas.attention.attention`: blocks of keys that no row sees are skipped.

    Probabilities are rounded to the type of the values before the second product, as in any flash attention.

    Arguments:
    - `sizes`: by default those of the device that is traced for.

    Raises `NotImplementedError` where `check_triton` does.
    """
    check_triton(q, scale)
    rows, heads, head_dim = q.shape
    sizes = sizes or sizes_for(head_dim, q.dtype.itemsize, target().capability)
    start, end = (jnp.asarray(bound, jnp.int32) for bound in (k_start, k_end))
    residual = jax.ShapeDtypeStruct((rows, heads), jnp.float32)
    out = launch(
        attend,
        *(q, k, v, start, end, rows, k.shape[0]),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), residual, residual],
        grid=(-(-rows // sizes.rows), heads),
        schedule=sizes.schedule,
        HEADS=heads,
        KV_HEADS=k.shape[1],
        HEAD_DIM=head_dim,
        SCALE=scale * math.log2(math.e),
        BLOCK_Q=sizes.rows,
        BLOCK_K=sizes.keys,
        BLOCK_D=block(head_dim),
        DEPTH=score_depth(head_dim, q.dtype.itemsize),
    )
    return AttentionOutput(*out)
