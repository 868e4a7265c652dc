"""Grouped matrix products: the entry point and the choice of a form."""

import warnings
from typing import Literal

from jdllm.pallas.device import target
from jdllm.pallas.dispatch import always, choose, limit
from jdllm.pallas.grouped_matmul.limits import check_mosaic_gpu
from jdllm.pallas.grouped_matmul.padded import grouped_matmul_padded
from jdllm.pallas.grouped_matmul.reference import grouped_matmul_reference
from jdllm.pallas.grouped_matmul.types import FirstGroup, Gate, GroupSizes, Product, Weights, X

Implementation = Literal["mosaic_gpu", "padded", "reference"]


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
      rounded to the dtype of `x`; "mosaic_gpu" never writes them, the other forms do.
    - `implementation`: "mosaic_gpu" (a kernel for Hopper, 16-bit types), "padded" (portable) or "reference"
      (dense oracle). By default mosaic_gpu where it can run, padded with a warning on CUDA where it cannot,
      and padded anywhere else. `lax.ragged_dot` is none of them: it multiplies every row with every matrix.
    - `platform`: what will run it, "cpu" or "cuda"; by default the platform of JAX's default device.

    Returns the products in the dtype of `x`, accumulated in f32.

    Raises `NotImplementedError` where the given implementation cannot run, naming its limit.
    """
    device = target(platform)

    def check() -> None:
        device.check_hopper("grouped products")
        check_mosaic_gpu(x, weights, gate)

    forms = {"mosaic_gpu": check, "padded": always, "reference": always}
    form = choose("grouped products", forms, implementation)
    arguments = x, weights, group_sizes, first_group, gate
    if form == "mosaic_gpu":
        # Pallas for GPUs takes a while to import: only where it runs.
        from jdllm.pallas.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu

        return grouped_matmul_mosaic_gpu(*arguments)
    if form == "reference":
        return grouped_matmul_reference(*arguments)
    if implementation is None and device.on_cuda:
        warnings.warn(f"experts are multiplied by a slow, portable form: {limit(check)}", stacklevel=2)
    return grouped_matmul_padded(*arguments)
