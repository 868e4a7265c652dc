"""The forms of products with matrices in few bits, and the limits of those for NVIDIA cards."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jdllm.pallas.dispatch import Form, Operator, check_one_dtype, forms_of
from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.quantised import GROUP, Float8

MOST_ROWS = 2048
"""With more rows, time is that of the arithmetic: XLA's products are faster, and the wide matrix costs little
beside them."""


def check_mosaic_gpu(x: Float[Array, "rows k"] | jax.ShapeDtypeStruct, weight: Any) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper form cannot take these operands."""
    _check_kernel("Hopper", (jnp.bfloat16, jnp.float16), x, weight)
    _, n, k = weight.shape
    if n % WARPGROUP_ROWS or k % GROUP or 0 in (n, k):
        raise NotImplementedError(
            f"the Hopper form takes matrices whose sides are multiples of {WARPGROUP_ROWS} and {GROUP},"
            f" not {n} and {k}"
        )


def check_triton(x: Float[Array, "rows k"] | jax.ShapeDtypeStruct, weight: Any) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Triton form cannot take these operands."""
    _check_kernel("Triton", (jnp.bfloat16, jnp.float16, jnp.float32), x, weight)
    _, n, k = weight.shape
    if k % GROUP or 0 in (n, k):
        raise NotImplementedError(f"the Triton form takes inputs in multiples of {GROUP}, not {n} x {k}")


def _check_kernel(
    form: str,
    dtypes: Sequence[DTypeLike],
    x: Float[Array, "rows k"] | jax.ShapeDtypeStruct,
    weight: Any,
) -> None:
    """The limits that both kernels have, whatever the sides of a matrix are."""
    names = ", ".join(jnp.dtype(dtype).name for dtype in dtypes)
    check_one_dtype(f"the {form} form multiplies rows of {names} with few bits, not of", dtypes, x)
    if not 1 <= x.shape[0] <= MOST_ROWS:
        raise NotImplementedError(f"the {form} form takes 1 to {MOST_ROWS} rows, not {x.shape[0]}")
    if isinstance(weight, Float8):
        raise NotImplementedError(
            f"the {form} form takes no floats of 8 bits, which XLA multiplies as they are"
        )


QUANTISED_MATMUL = Operator[None](
    "products with matrices in few bits",
    forms_of(
        "jdllm.pallas.quantised_matmul",
        Form("mosaic_gpu", check_mosaic_gpu, "mosaic_gpu"),
        Form("triton", check_triton, "triton"),
        Form("xla"),
    ),
)
"""Checked by rows and the stack."""
