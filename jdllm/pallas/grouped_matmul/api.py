"""Grouped matrix products: the entry point and the choice of a form."""

import warnings
from typing import Literal

from jdllm.pallas.device import target
from jdllm.pallas.grouped_matmul.limits import operator_for
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
    - `weights`: a matrix `[k, n]` per group, in the dtype of `x`, or a `Quantised` with a matrix `[n, k]` per
      group. It may hold more than the groups at hand, such as those of all layers, so that nobody has to
      slice it.
    - `group_sizes`: rows in each group, which add up to all rows; a group may be empty.
    - `first_group`: index in `weights` of the first group's matrix.
    - `gate`: a second matrix per group, of the kind of `weights`. With it the result is silu(x gate) * (x
      weights), both products rounded to the dtype of `x`; "mosaic_gpu" and "triton" never write them, the
      other forms do.
    - `implementation`: "mosaic_gpu" (for Hopper), "triton" (from Ampere on, by the extras cuda12 and cuda13;
      for no floats of 8 bits), "padded" (portable) or "reference" (dense oracle); by default the first
      that can run and is not turned off; on CUDA, padded with a warning. `lax.ragged_dot` is none of them: it
      multiplies every row with every matrix.
    - `platform`: what will run it, "cpu" or "cuda"; by default the platform of JAX's default device.

    Returns the products in the dtype of `x`, accumulated in f32.

    Raises `NotImplementedError` where the given implementation cannot run, naming its limit.
    """
    device, operator = target(platform), operator_for(weights)
    form = operator.choose(device, implementation, x, weights, gate)
    if implementation is None and form.language == "xla" and device.on_cuda and device.kernels != "xla":
        reasons = "; ".join(operator.limits(device, x, weights, gate))
        warnings.warn(f"experts are multiplied by a slow, portable form: {reasons}", stacklevel=2)
    return form(x, weights, group_sizes, first_group, gate)
