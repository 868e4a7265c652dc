"""The forms of grouped products, and what those for NVIDIA cards can take."""

import jax
import jax.numpy as jnp

from jdllm.pallas.device import Target
from jdllm.pallas.dispatch import Forms, card_forms
from jdllm.pallas.grouped_matmul.tiles import CHUNK, DEPTH
from jdllm.pallas.grouped_matmul.types import Gate, Weights, X


def forms(
    device: Target,
    x: X | jax.ShapeDtypeStruct,
    weights: Weights | jax.ShapeDtypeStruct,
    gate: Gate | jax.ShapeDtypeStruct,
) -> Forms:
    """The forms of grouped products of these operands on a device."""
    checks = (lambda: check_mosaic_gpu(x, weights, gate)), (lambda: check_triton(x, weights, gate))
    return card_forms(device, "grouped products", *checks, "padded", "reference")


def check_mosaic_gpu(
    x: X | jax.ShapeDtypeStruct,
    weights: Weights | jax.ShapeDtypeStruct,
    gate: Gate | jax.ShapeDtypeStruct,
) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Hopper form cannot take these operands."""
    dtypes = {x.dtype, weights.dtype} | ({gate.dtype} if gate is not None else set())
    if len(dtypes) > 1 or x.dtype not in (jnp.bfloat16, jnp.float16):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise NotImplementedError(
            f"the Hopper form multiplies groups of all bfloat16 or all float16, not of {names}"
        )
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


def check_triton(
    x: X | jax.ShapeDtypeStruct,
    weights: Weights | jax.ShapeDtypeStruct,
    gate: Gate | jax.ShapeDtypeStruct,
) -> None:
    """Raise `NotImplementedError`, naming the limit, where the Triton form cannot take these operands."""
    dtypes = {x.dtype, weights.dtype} | ({gate.dtype} if gate is not None else set())
    if len(dtypes) > 1 or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise NotImplementedError(
            f"the Triton form multiplies groups of all bfloat16, all float16 or all float32, not of {names}"
        )
    if 0 in weights.shape[1:]:
        raise NotImplementedError(f"the Triton form takes no matrices without numbers, {weights.shape[1:]}")
    if gate is not None and gate.shape != weights.shape:
        raise NotImplementedError(
            f"the Triton form takes gates of the shape of the matrices, not {gate.shape} and {weights.shape}"
        )
