"""The forms of products with matrices in few bits, and the limits of those for NVIDIA cards."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.pallas.dispatch import Form, Operator, check_one_dtype, forms_of
from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.quantised import GROUP, Float8

MOST_ROWS = 2048
"""With more rows, time is that of the arithmetic: XLA's products are faster, and the wide matrix costs little
beside them."""


def check_mosaic_gpu(x: Float[Array, "rows k"] | jax.ShapeDtypeStruct, weight: Any) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper form cannot take these operands."""
    refusal = "the Hopper form multiplies rows of bfloat16 or float16 with matrices in few bits, not of"
    check_one_dtype(refusal, (jnp.bfloat16, jnp.float16), x)
    if not 1 <= x.shape[0] <= MOST_ROWS:
        raise NotImplementedError(f"the Hopper form takes 1 to {MOST_ROWS} rows, not {x.shape[0]}")
    if isinstance(weight, Float8):
        raise NotImplementedError(
            "the Hopper form takes no floats of 8 bits, which XLA multiplies as they are"
        )
    _, n, k = weight.shape
    if n % WARPGROUP_ROWS or k % GROUP or 0 in (n, k):
        raise NotImplementedError(
            f"the Hopper form takes matrices whose sides are multiples of {WARPGROUP_ROWS} and {GROUP},"
            f" not {n} and {k}"
        )


def check_triton(x: Float[Array, "rows k"] | jax.ShapeDtypeStruct, weight: Any) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Triton form cannot take these operands."""
    refusal = "the Triton form multiplies rows of bfloat16, float16 or float32 with few bits, not of"
    check_one_dtype(refusal, (jnp.bfloat16, jnp.float16, jnp.float32), x)
    if not 1 <= x.shape[0] <= MOST_ROWS:
        raise NotImplementedError(f"the Triton form takes 1 to {MOST_ROWS} rows, not {x.shape[0]}")
    if isinstance(weight, Float8):
        raise NotImplementedError("the Triton form takes no floats of 8 bits, which are XLA's")
    _, n, k = weight.shape
    if k % GROUP or 0 in (n, k):
        raise NotImplementedError(f"the Triton form takes inputs in multiples of {GROUP}, not {n} x {k}")


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
