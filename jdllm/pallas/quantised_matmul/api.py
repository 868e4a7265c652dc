"""Products with matrices in few bits: the entry point and the choice of a form."""

from typing import Literal

from jaxtyping import Array, Float, Int

from jdllm.pallas.device import target
from jdllm.pallas.quantised_matmul.limits import QUANTISED_MATMUL
from jdllm.quantised import Quantised

Implementation = Literal["mosaic_gpu", "triton", "xla"]


def quantised_matmul(
    x: Float[Array, "rows k"],
    weight: Quantised,
    *,
    layer: Int[Array, ""] | int,
    implementation: Implementation | None = None,
) -> Float[Array, "rows n"]:
    """Multiply rows with one layer's matrix, which is widened on its way to the tensor cores.

    Arguments:
    - `x`: the rows.
    - `weight`: a stack `[layers, n, k]` with a matrix for each layer, whose rows make the outputs.
    - `layer`: the number of the matrix. The stack is never sliced, which would copy the matrix.
    - `implementation`: "mosaic_gpu" (for Hopper), "triton" (from Ampere on, by the extras cuda12 and cuda13)
      or "xla" (portable). By default the first that can run and is not turned off.

    Returns x @ weight[layer].T in the dtype of `x`. Sums are f32.

    Raises `NotImplementedError` where the given implementation cannot run, naming its limit.
    """
    form = QUANTISED_MATMUL.choose(target(), implementation, x, weight)
    return form(x, weight, layer=layer)
