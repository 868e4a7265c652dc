"""The forms of products of a few rows, and what those for NVIDIA cards can take."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdllm.pallas.dispatch import Form, Operator, check_one_dtype, forms_of
from jdllm.pallas.skinny_matmul.tiles import MAX_ROWS, WIDE, column_unit, depth_of
from jdllm.pallas.skinny_matmul.types import X, kind_of

Stacks = Sequence[Any]
"""Weights, which may be abstract."""


def check_mosaic_gpu(x: X | jax.ShapeDtypeStruct, weights: Stacks, head_dim: int | None = None) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper form cannot take these operands.

    Arguments:
    - `head_dim`: of products that are rotated.
    """
    refusal = "the Hopper form multiplies few rows of all bfloat16 or all float16, not of"
    kind = kind_of(weights)
    bits = kind.bits if kind else WIDE
    check_one_dtype(refusal, (jnp.bfloat16, jnp.float16), x, *(() if kind else weights))
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise NotImplementedError(f"the Hopper form takes 1 to {MAX_ROWS} rows, not {x.shape[0]}")
    k, depth = weights[0].shape[2], depth_of(bits)
    unit, turned = (column_unit(bits, rotated) for rotated in (False, True))
    for n in (w.shape[1] for w in weights):
        if n % unit or k % depth or 0 in (n, k):
            raise NotImplementedError(
                f"the Hopper form takes weights whose sides are multiples of {unit} and {depth}, "
                f"not {n} and {k}"
            )
    if head_dim and head_dim % turned:
        raise NotImplementedError(
            f"the Hopper form rotates heads of multiples of {turned}, not of {head_dim}"
        )


def check_triton(x: X | jax.ShapeDtypeStruct, weights: Stacks, head_dim: int | None = None) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Triton form cannot take these operands.

    Arguments:
    - `head_dim`: of products that are rotated; any.
    """
    if kind_of(weights):
        raise NotImplementedError("the Triton form takes no quantised weights")
    refusal = "the Triton form multiplies few rows of all bfloat16, all float16 or all float32, not of"
    check_one_dtype(refusal, (jnp.bfloat16, jnp.float16, jnp.float32), x, *weights)
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise NotImplementedError(f"the Triton form takes 1 to {MAX_ROWS} rows, not {x.shape[0]}")
    if any(0 in w.shape[1:] for w in weights):
        raise NotImplementedError(f"the Triton form takes no weights of {[w.shape for w in weights]}")


SKINNY_MATMUL = Operator[None](
    "products of a few rows",
    forms_of(
        "jdllm.pallas.skinny_matmul",
        Form("mosaic_gpu", check_mosaic_gpu, "mosaic_gpu", hints=("chained",)),
        Form("triton", check_triton, "triton"),
        Form("xla"),
    ),
)
"""Checked by rows, weights and, where products are rotated, the size of heads."""
