"""Products with matrices in few bits in Triton: a kernel streams weights, XLA adds the sums of parts."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.pallas.device import target
from jdllm.pallas.quantised_matmul.limits import check_triton
from jdllm.pallas.quantised_matmul.triton_kernel import multiply_rows
from jdllm.pallas.skinny_matmul.triton import parts_of
from jdllm.pallas.triton_launch import MANY, ProductSizes, Schedule, SizeTable, fitting, launch
from jdllm.quantised import GROUP, SHIFTED_GROUP, Grouped, Quantised, Shifted

_SIZES: SizeTable[ProductSizes] = {
    2: (
        (16, 99, ProductSizes(16, 128, 64, Schedule(4, 4))),
        (32, 99, ProductSizes(32, 128, 64, Schedule(4, 4))),
        (64, 99, ProductSizes(64, 128, 64, Schedule(4, 3))),
        (MANY, 99, ProductSizes(128, 128, 32, Schedule(8, 3))),
    ),
    4: (
        (16, 99, ProductSizes(16, 64, 32, Schedule(4, 2))),
        (MANY, 99, ProductSizes(32, 64, 32, Schedule(4, 2))),
    ),
}
"""Of up to so many rows. Each depth divides the inputs that share a scale alone, and is a multiple of those
that share a scale and an offset."""

sizes_for = functools.partial(fitting, _SIZES)


def ordered_rows(x: Float[Array, "rows k"], weight: Quantised) -> Float[Array, "*half rows inputs"]:
    """Rows whose inputs are in the order of a weight; in 4 bits `[2, rows, k / 2]`, those of the lower bits
    of all bytes first."""
    ordered = weight.stored_order(x)
    if isinstance(weight, Grouped):
        return jnp.stack([ordered[:, half::2] for half in range(2)])
    return ordered


def quantised_matmul_triton(
    x: Float[Array, "rows k"],
    weight: Quantised,
    *,
    layer: Int[Array, ""] | int,
    sizes: ProductSizes | None = None,
) -> Float[Array, "rows n"]:
    """Triton form of `jdllm.pallas.quantised_matmul.quantised_matmul`.

    Every sum adds its terms in an order that depends on the cut alone. Weights whose groups have offsets are
    rounded to the dtype of `x`, as by XLA. No other weight is: sums are scaled, in 4 bits those of each step.

    Arguments:
    - `sizes`: by default those of the device that is traced for.

    Raises `NotImplementedError` where `check_triton` does.
    """
    check_triton(x, weight)
    (rows, k), n = x.shape, weight.shape[1]
    shifted = isinstance(weight, Shifted)
    sizes = sizes or sizes_for(rows, x.dtype.itemsize, target().capability)
    columns, row_blocks = -(-n // sizes.columns), -(-rows // sizes.rows)
    parts = parts_of(columns * row_blocks, k // sizes.depth)
    (sums,) = launch(
        multiply_rows,
        *(
            ordered_rows(x, weight),
            weight.values,
            weight.scales,
            weight.offsets if shifted else weight.scales,
            jnp.asarray(layer, jnp.int32).reshape(1),
            rows,
        ),
        out_shape=[jax.ShapeDtypeStruct((parts, rows, n), x.dtype if parts == 1 else jnp.float32)],
        grid=(columns, row_blocks, parts),
        schedule=sizes.schedule,
        PARTS=parts,
        K=k,
        N=n,
        GROUP=SHIFTED_GROUP if shifted else GROUP if isinstance(weight, Grouped) else 0,
        SHIFTED=shifted,
        BLOCK_R=sizes.rows,
        BLOCK_N=sizes.columns,
        BLOCK_K=sizes.depth,
    )
    return functools.reduce(jnp.add, sums).astype(x.dtype)
