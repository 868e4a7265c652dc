"""Grouped matrix products: the entry point and the choice of a form."""

import warnings
from typing import Literal

from jdllm.pallas.device import target
from jdllm.pallas.dispatch import choose, limit
from jdllm.pallas.grouped_matmul.limits import forms
from jdllm.pallas.grouped_matmul.padded import grouped_matmul_padded
from jdllm.pallas.grouped_matmul.reference import grouped_matmul_reference
from jdllm.pallas.grouped_matmul.types import FirstGroup, Gate, GroupSizes, Product, Weights, X

Implementation = Literal["mosaic_gpu", "triton", "padded", "reference"]


def grouped_matmul(
    x: X,
    weights: Weights,
    group_sizes: GroupSizes,
    *,
    first_group: FirstGroup = 0,
    gate: Gate = None,
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
    - `gate`: a second matrix per group. With it the result is silu(x gate) * (x weights), both products
      rounded to the dtype of `x`; "mosaic_gpu" and "triton" never write them, the other forms do.
    - `implementation`: "mosaic_gpu" (a kernel for Hopper, 16-bit types), "triton" (a kernel for cards from
      Ampere on, by the extras cuda12 and cuda13), "padded" (portable) or "reference" (dense oracle). By
      default the first that can run, and is not turned off (`jdllm.pallas.device.preferring`); on CUDA,
      padded with a warning. `lax.ragged_dot` is none of them: it multiplies every row with every matrix.
    - `platform`: what will run it, "cpu" or "cuda"; by default the platform of JAX's default device.

    Returns the products in the dtype of `x`, accumulated in f32.

    Raises `NotImplementedError` where the given implementation cannot run, naming its limit.
    """
    device = target(platform)

    possible = forms(device, x, weights, gate)
    form = choose("grouped products", possible, implementation, device.kernels)
    arguments = x, weights, group_sizes, first_group, gate
    if form == "mosaic_gpu":
        # Pallas for GPUs takes a while to import: only where it runs.
        from jdllm.pallas.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu

        return grouped_matmul_mosaic_gpu(*arguments)
    if form == "triton":
        # So does Triton.
        from jdllm.pallas.grouped_matmul.triton import grouped_matmul_triton

        return grouped_matmul_triton(*arguments)
    if form == "reference":
        return grouped_matmul_reference(*arguments)
    if implementation is None and device.on_cuda and device.kernels != "xla":
        reasons = "; ".join(filter(None, map(limit, possible.values())))
        warnings.warn(f"experts are multiplied by a slow, portable form: {reasons}", stacklevel=2)
    return grouped_matmul_padded(*arguments)
