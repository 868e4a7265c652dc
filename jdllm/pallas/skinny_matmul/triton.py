"""Products of a few rows in Triton: one kernel streams the weights, XLA adds the sums of their parts."""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jdllm.pallas.device import target
from jdllm.pallas.skinny_matmul.limits import check_triton
from jdllm.pallas.skinny_matmul.triton_kernel import multiply_rows
from jdllm.pallas.skinny_matmul.types import Bias, Layer, Product, Rotation, Stack, X
from jdllm.pallas.skinny_matmul.xla import rotated
from jdllm.pallas.triton_launch import ProductSizes, Schedule, SizeTable, fitting, launch

PROGRAMS = 128
"""As many keep any card busy."""

_MOST_PARTS = 8
"""Partial sums are written, then read by another kernel, while nothing streams."""

_SIZES: SizeTable[ProductSizes] = {
    2: (
        (16, 99, ProductSizes(16, 128, 64, Schedule(4, 5))),
        (32, 99, ProductSizes(32, 128, 64, Schedule(4, 5))),
        (64, 99, ProductSizes(64, 128, 64, Schedule(4, 4))),
    ),
    4: (
        (16, 99, ProductSizes(16, 256, 16, Schedule(4, 4))),
        (32, 99, ProductSizes(32, 256, 32, Schedule(4, 3))),
        (64, 99, ProductSizes(64, 128, 16, Schedule(4, 3))),
    ),
}
"""Of up to so many rows."""


sizes_for = functools.partial(fitting, _SIZES)


def skinny_matmul_triton(
    x: X,
    weights: Sequence[Stack],
    *,
    layer: Layer,
    gated: bool = False,
    bias: Bias | None = None,
    rotation: Rotation | None = None,
    sizes: ProductSizes | None = None,
) -> tuple[Product, ...]:
    """Triton form of `jdllm.pallas.skinny_matmul.skinny_matmul`.

    Every sum adds its terms in an order that depends on the cut alone: a row's bits depend on the row and
    the number of rows, not on what the others hold. A gated product differs from two products in the last
    bit of the silu.

    Arguments:
    - `sizes`: by default those of the device that is traced for.

    Raises `NotImplementedError` where `check_triton` does.
    """
    check_triton(x, weights)
    (rows, k), outputs = x.shape, [w.shape[1] for w in weights][: 1 if gated else None]
    sizes = sizes or sizes_for(rows, x.dtype.itemsize, target().capability)
    columns = sizes.columns // (2 if gated else 1)
    blocks = sum(-(-n // columns) for n in outputs)
    parts = 1 if gated else parts_of(blocks, -(-k // sizes.depth))
    kind = x.dtype if parts == 1 and bias is None else jnp.float32
    stacks, (n_0, n_1, n_2) = [*weights, weights[0], weights[0]][:3], (*outputs, 0, 0)[:3]
    (sums,) = launch(
        multiply_rows,
        *(x, *stacks, jnp.asarray(layer, jnp.int32).reshape(1), rows),
        out_shape=[jax.ShapeDtypeStruct((parts, rows, sum(outputs)), kind)],
        grid=(blocks, parts),
        schedule=sizes.schedule,
        PARTS=parts,
        K=k,
        N_0=n_0,
        N_1=n_1,
        N_2=n_2,
        GATED=gated,
        BLOCK_R=sizes.rows,
        BLOCK_N=columns,
        BLOCK_K=sizes.depth,
    )
    y = functools.reduce(jnp.add, sums)
    if bias is not None:
        y += lax.dynamic_index_in_dim(bias, layer, keepdims=False)
    products = tuple(jnp.split(y.astype(x.dtype), list(itertools.accumulate(outputs[:-1])), axis=1))
    return products if rotation is None else rotated(products, rotation)


def parts_of(blocks: int, steps: int) -> int:
    """Parts that inputs of so many steps are cut into, each of which takes so many programs."""
    return min(-(-PROGRAMS // blocks), steps, _MOST_PARTS)
