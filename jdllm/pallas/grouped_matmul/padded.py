"""The portable form: groups padded to blocks of rows, and a batched product over a few blocks at a time."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jdllm.pallas.grouped_matmul.gated import gated_by_two_products
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Product, Weights, X, sides, wide
from jdllm.quantised import Quantised

_BLOCK = 128
_BATCH = 8
_BATCH_OF_FEW_BITS = 1  # as many matrices are wide at once


@gated_by_two_products
def grouped_matmul_padded(
    x: X, weights: Weights, group_sizes: GroupSizes, first_group: FirstGroup
) -> Product:
    """Portable form of `jdllm.pallas.grouped_matmul.grouped_matmul`.

    Each group is cut into blocks of 128 rows, the last one padded. A device loop takes 8 blocks at a time,
    gathers their rows and the matrices of their groups, and multiplies: temporaries do not grow with the
    rows, work grows with the blocks that there are. All products have one shape, so that a row's result
    does not depend on the other rows. Of matrices in few bits it takes a block at a time, so that one matrix
    is wide at once.
    """
    batch = _BATCH_OF_FEW_BITS if isinstance(weights, Quantised) else _BATCH
    rows = x.shape[0]
    sizes = jnp.asarray(group_sizes)
    row_ends = jnp.cumsum(sizes)
    blocks = -(-sizes // _BLOCK)
    block_ends = jnp.cumsum(blocks)

    def multiply(index: Int[Array, ""], out: Product) -> Product:
        block = index * batch + jnp.arange(batch)
        group = jnp.searchsorted(block_ends, block, side="right", method="compare_all")
        group = jnp.minimum(group, sizes.shape[0] - 1)
        in_group = block - (block_ends - blocks)[group]
        row = (row_ends - sizes)[group][:, None] + in_group[:, None] * _BLOCK + jnp.arange(_BLOCK)
        row = jnp.where(row < row_ends[group][:, None], row, rows)
        y = lax.dot_general(
            x.at[row].get(mode="fill", fill_value=0),
            wide(weights, lambda part: part[first_group + group], x.dtype),
            (((2,), (1,)), ((0,), (0,))),
            precision=lax.Precision.HIGHEST,
        )
        return out.at[row].set(y, mode="drop")

    out = jnp.zeros((rows, sides(weights)[1]), x.dtype)
    return lax.fori_loop(0, -(-block_ends[-1] // batch), multiply, out)
