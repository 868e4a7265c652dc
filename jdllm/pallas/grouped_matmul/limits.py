"""The forms of grouped products, and what those for NVIDIA cards can take."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jdllm.pallas.dispatch import Form, Language, Operator, check_one_dtype, forms_of
from jdllm.pallas.grouped_matmul.tiles import CHUNK, DEPTH
from jdllm.pallas.grouped_matmul.types import Plain, Weights, X, sides
from jdllm.pallas.hopper import WARPGROUP_ROWS
from jdllm.quantised import GROUP, Float8, Quantised, Shifted

Rows = X | jax.ShapeDtypeStruct
Matrices = Plain | jax.ShapeDtypeStruct


def check_mosaic_gpu(x: Rows, weights: Matrices, gate: Matrices | None) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper form cannot take these operands."""
    refusal = "the Hopper form multiplies groups of all bfloat16 or all float16, not of"
    check_one_dtype(refusal, (jnp.bfloat16, jnp.float16), x, weights, *([] if gate is None else [gate]))
    _, k, n = weights.shape
    if k % DEPTH or n % CHUNK or 0 in (k, n):
        raise NotImplementedError(
            f"the Hopper form takes matrices whose sides are multiples of {DEPTH} and {CHUNK}, "
            f"not {k} and {n}"
        )
    if gate is not None and gate.shape != weights.shape:
        raise NotImplementedError(
            f"the Hopper form takes gates of the shape of the matrices, not {gate.shape} and {weights.shape}"
        )


def check_triton(x: Rows, weights: Matrices, gate: Matrices | None) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Triton form cannot take these operands."""
    refusal = "the Triton form multiplies groups of all bfloat16, all float16 or all float32, not of"
    check_one_dtype(
        refusal, (jnp.bfloat16, jnp.float16, jnp.float32), x, weights, *([] if gate is None else [gate])
    )
    if 0 in weights.shape[1:]:
        raise NotImplementedError(f"the Triton form takes no matrices without numbers, {weights.shape[1:]}")
    if gate is not None and gate.shape != weights.shape:
        raise NotImplementedError(
            f"the Triton form takes gates of the shape of the matrices, not {gate.shape} and {weights.shape}"
        )


def check_few_bits_mosaic_gpu(x: Rows, weights: Quantised, gate: Quantised | None) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper form for few bits cannot take these
    operands."""
    refusal = "the Hopper form for few bits multiplies rows of bfloat16 or float16, not of"
    check_one_dtype(refusal, (jnp.bfloat16, jnp.float16), x)
    _check_kind("Hopper", weights, gate)
    k, n = sides(weights)
    if k % GROUP or n % WARPGROUP_ROWS or 0 in (k, n):
        raise NotImplementedError(
            f"the Hopper form for few bits takes inputs in multiples of {GROUP} and outputs in multiples of"
            f" {WARPGROUP_ROWS}, not {k} and {n}"
        )


def check_few_bits_triton(x: Rows, weights: Quantised, gate: Quantised | None) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Triton form for few bits cannot take these
    operands."""
    refusal = "the Triton form for few bits multiplies rows of bfloat16, float16 or float32, not of"
    check_one_dtype(refusal, (jnp.bfloat16, jnp.float16, jnp.float32), x)
    _check_kind("Triton", weights, gate)
    k, n = sides(weights)
    if isinstance(weights, Float8):
        raise NotImplementedError("the Triton form for few bits takes no floats of 8 bits")
    if k % GROUP or 0 in (k, n):
        raise NotImplementedError(
            f"the Triton form for few bits takes inputs in multiples of {GROUP}, not {k} and {n} outputs"
        )


def _check_kind(form: str, weights: Quantised, gate: Quantised | None) -> None:
    """The limits that both kernels for few bits have, whatever the sides of a matrix are."""
    if isinstance(weights, Shifted):
        raise NotImplementedError(f"the {form} form for few bits takes no groups with offsets")
    if gate is not None and (type(gate), gate.shape) != (type(weights), weights.shape):
        raise NotImplementedError(
            f"the {form} form for few bits takes gates of the form and shape of the matrices, not"
            f" {type(gate).__name__} {gate.shape} and {type(weights).__name__} {weights.shape}"
        )


PORTABLE = forms_of(
    "jdllm.pallas.grouped_matmul", Form("padded", workspace=2), Form("reference", workspace=2)
)

GROUPED_MATMUL = Operator(
    "grouped products",
    forms_of(
        "jdllm.pallas.grouped_matmul",
        Form("mosaic_gpu", check_mosaic_gpu, "mosaic_gpu", workspace=0),
        Form("triton", check_triton, "triton", workspace=0),
    )
    + PORTABLE,
)
"""Checked by rows, matrices and gates. Workspaces are the products that a gated one is made of in memory."""

_FEW_BITS = "jdllm.pallas.grouped_matmul.few_bits"
_FEW_BITS_CHECKS: dict[Language, Callable[..., None]] = {
    "mosaic_gpu": check_few_bits_mosaic_gpu,
    "triton": check_few_bits_triton,
}

FEW_BITS_GROUPED_MATMUL = Operator(
    "grouped products with matrices in few bits",
    (
        *(
            Form(
                language, check, language, (), 0, f"{_FEW_BITS}_{language}:grouped_matmul_few_bits_{language}"
            )
            for language, check in _FEW_BITS_CHECKS.items()
        ),
        *PORTABLE,
    ),
)
"""The same of matrices in few bits."""


def operator_for(weights: Weights | jax.ShapeDtypeStruct) -> Operator[int]:
    """The table of forms for matrices of this kind."""
    return FEW_BITS_GROUPED_MATMUL if isinstance(weights, Quantised) else GROUPED_MATMUL
