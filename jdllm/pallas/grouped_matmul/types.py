"""The arrays of every grouped product."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.arrays import Tensor
from jdllm.quantised import Quantised

X = Float[Array, "rows k"]
Plain = Float[Array, "all_groups k n"]
Weights = Plain | Quantised
"""A matrix for each group. Matrices in few bits are `[all_groups, n, k]`."""
Gate = Weights | None
GroupSizes = Int[Tensor, " groups"]
FirstGroup = Int[Tensor, ""] | int
Product = Float[Array, "rows n"]


def sides(weights: Weights | jax.ShapeDtypeStruct) -> tuple[int, int]:
    """Inputs and outputs of a matrix."""
    _, first, second = weights.shape
    return (second, first) if isinstance(weights, Quantised) else (first, second)


def wide(
    weights: Weights, take: Callable[[Array], Array], dtype: jnp.dtype
) -> Float[Array, "some_groups k n"]:
    """Some of the matrices, in `dtype` where they are in few bits.

    Arguments:
    - `take`: makes the parts of these matrices of the parts of all.
    """
    some = jax.tree.map(take, weights)
    return some.dequantised(dtype).mT if isinstance(some, Quantised) else some
