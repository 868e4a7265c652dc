"""What the Hopper kernels of single rows can take."""

import jax.numpy as jnp

ROW_UNIT = 512
"""A row's columns are a multiple: four for each thread of a warpgroup."""

LANES = 32
"""Rotated pairs of a head are a multiple: some for each thread of a warp."""

WARPS = 4
"""Heads are a multiple: each is turned by one warp."""


def check_mosaic_gpu(dtype: jnp.dtype, columns: int, heads: tuple[int, ...], pairs: int) -> None:
    """Raise `NotImplementedError`, naming the limit, for rows that the kernels cannot take.

    Arguments:
    - `columns`: of the residual stream.
    - `heads`: how many queries and keys have.
    - `pairs`: rotated pairs of a head, which are all of it.
    """
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"kernels of single rows take bfloat16 or float16, not {dtype}")
    if columns % ROW_UNIT:
        raise NotImplementedError(
            f"kernels of single rows take multiples of {ROW_UNIT} columns, not {columns}"
        )
    if pairs % LANES or any(count % WARPS for count in heads):
        raise NotImplementedError(
            f"the rotation takes multiples of {WARPS} heads and of {LANES} pairs, not {heads} and {pairs}"
        )
