"""Grouped matrix products: the entry point and the choice of a form."""

import warnings
from typing import Literal

import jax.numpy as jnp

from jdllm.pallas.device import target
from jdllm.pallas.grouped_matmul.padded import grouped_matmul_padded
from jdllm.pallas.grouped_matmul.reference import grouped_matmul_reference
from jdllm.pallas.grouped_matmul.tokamax_adapter import grouped_matmul_tokamax
from jdllm.pallas.grouped_matmul.types import FirstGroup, GroupSizes, Product, Weights, X

Implementation = Literal["tokamax", "padded", "reference"]

_FORMS = {
    "tokamax": grouped_matmul_tokamax,
    "padded": grouped_matmul_padded,
    "reference": grouped_matmul_reference,
}


def grouped_matmul(
    x: X,
    weights: Weights,
    group_sizes: GroupSizes,
    *,
    first_group: FirstGroup = 0,
    implementation: Implementation | None = None,
    platform: str | None = None,
) -> Product:
    """Multiply each row with the matrix of its group.

    Arguments:
    - `x`: rows sorted by group.
    - `weights`: a matrix `[k, n]` per group, in the dtype of `x`. It may hold more than the groups at hand,
      such as those of all layers, so that nobody has to slice it.
    - `group_sizes`: rows in each group, which add up to all rows; a group may be empty.
    - `first_group`: index in `weights` of the first group's matrix.
    - `implementation`: "tokamax" (Mosaic GPU kernels, 16-bit types), "padded" (portable) or "reference"
      (dense oracle). By default tokamax on CUDA, padded anywhere else, and padded with a warning on CUDA
      where tokamax cannot run. `lax.ragged_dot` is none of them: it multiplies every row with every matrix.
    - `platform`: what will run it, "cpu" or "cuda"; by default the platform of JAX's default device.

    Returns the products in the dtype of `x`, accumulated in f32.

    Raises `NotImplementedError` where the given implementation cannot run, naming its limit.
    """
    on_cuda = target(platform).on_cuda
    if implementation is not None:
        if implementation == "tokamax":
            _check_tokamax(x, on_cuda)
        return _FORMS[implementation](x, weights, group_sizes, first_group)
    if on_cuda:
        try:
            _check_tokamax(x, on_cuda)
            return grouped_matmul_tokamax(x, weights, group_sizes, first_group)
        except NotImplementedError as e:
            warnings.warn(f"experts are multiplied by a slow, portable form: {e}", stacklevel=2)
    return grouped_matmul_padded(x, weights, group_sizes, first_group)


def _check_tokamax(x: X, on_cuda: bool) -> None:
    if not on_cuda:
        raise NotImplementedError("tokamax multiplies groups on CUDA only")
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"tokamax multiplies groups of bfloat16 and float16 only, not of {x.dtype}")
