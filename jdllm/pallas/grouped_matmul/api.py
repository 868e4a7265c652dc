"""Grouped matrix products: the entry point and the choice of a form."""

import warnings
from typing import Literal

from jdllm.pallas.device import Target, target
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
    match implementation or _default(device, x, weights, gate):
        case "mosaic_gpu":
            _check_mosaic_gpu(device, x, weights, gate)
            # Pallas for GPUs takes a while to import: only where it runs.
            from jdllm.pallas.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu as form
        case "padded":
            form = grouped_matmul_padded
        case "reference":
            form = grouped_matmul_reference
        case unknown:
            raise NotImplementedError(f"grouped products have no implementation {unknown!r}")
    return form(x, weights, group_sizes, first_group, gate)


def _default(device: Target, x: X, weights: Weights, gate: Gate) -> Implementation:
    if not device.on_cuda:
        return "padded"
    try:
        _check_mosaic_gpu(device, x, weights, gate)
    except NotImplementedError as e:
        warnings.warn(f"experts are multiplied by a slow, portable form: {e}", stacklevel=3)
        return "padded"
    return "mosaic_gpu"


def _check_mosaic_gpu(device: Target, x: X, weights: Weights, gate: Gate) -> None:
    device.check_hopper("grouped products")
    check_mosaic_gpu(x, weights, gate)
